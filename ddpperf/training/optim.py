"""How a training changes its parameters: the optimizer, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ddpperf.specs import RunSpec, TrainingSpec
from ddpperf.training.optimizers import Lamb, Lars, Muon

PEAK_RATE = 0.01


def optimizer_of(model: nn.Module, spec: TrainingSpec, device: torch.device) -> torch.optim.Optimizer:
    """A run's own; else SGD with momentum."""
    return _of_run(model, spec, device) if isinstance(spec, RunSpec) else _sgd(model, spec, device)


def _sgd(model: nn.Module, spec: TrainingSpec, device: torch.device) -> torch.optim.Optimizer:
    """SGD with momentum; by zero1 each rank keeps the momentum of its share of the parameters, and updates those."""
    fused = (
        device.type == "cuda" and spec.strategy != "fsdp"
    )  # torch 2.11 has no fused SGD of sharded parameters
    settings: dict[str, Any] = {"lr": PEAK_RATE, "momentum": 0.9, "weight_decay": 5e-4, "fused": fused}
    if spec.strategy == "zero1":
        from torch.distributed.optim import (
            ZeroRedundancyOptimizer,
        )  # only here: every rank would wait for the import

        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, **settings
        )
    return torch.optim.SGD(model.parameters(), **settings)


def _of_run(model: nn.Module, spec: RunSpec, device: torch.device) -> torch.optim.Optimizer:
    """Weights of two dimensions or more decay, biases and normalizations do not. Muon leaves the last of the
    weights, which is a classifier's, to SGD."""
    trained = [each for each in model.parameters() if each.requires_grad]
    weights, vectors = ([each for each in trained if (each.ndim > 1) == wanted] for wanted in (True, False))
    if spec.optimizer == "sgd":
        decayed: list[dict[str, Any]] = [
            {"params": weights, "weight_decay": spec.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.SGD(
            decayed, lr=spec.rate, momentum=spec.momentum, nesterov=True, fused=device.type == "cuda"
        )
    if spec.optimizer == "lars":
        return Lars(trained, lr=spec.rate, momentum=spec.momentum, weight_decay=spec.weight_decay)
    if spec.optimizer == "lamb":
        return Lamb(trained, lr=spec.rate, betas=(spec.momentum, 0.999), weight_decay=spec.weight_decay)
    hidden: dict[str, Any] = {"params": weights[:-1]}
    rest: dict[str, Any] = {"params": [*weights[-1:], *vectors], "orthogonal": False}
    return Muon([hidden, rest], lr=spec.rate, momentum=spec.momentum, weight_decay=spec.weight_decay)


def cosine_rates(peak: float, steps: int) -> list[float]:
    """The learning rate of each of an epoch's steps: half a cosine from `peak` towards 0 (SGDR, Loshchilov and Hutter 2017,
    equation 5, restarting every epoch)."""
    return [peak / 2 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


class Schedule:
    """Gives the optimizer the rate of each step, from `begin` on.

    captured: the rates lie on the device with a counter of the steps, and the optimizer's rate is a tensor, so that a graph
    moves them, too: a plain number would stay what it was when the graph was captured.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rates: list[float], device: torch.device, *, captured: bool
    ) -> None:
        self.optimizer = optimizer
        self.rates = rates
        self.steps = 0
        self.rate: Tensor | None = None
        if captured:
            self.rates_on_device = torch.tensor(rates, device=device)
            self.step_on_device = torch.zeros(1, dtype=torch.int64, device=device)
            self.rate = torch.tensor(rates[0], device=device)
            self._set(self.rate)

    def _set(self, rate: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def begin(self, step: int = 0) -> None:
        """Start again, or at a later step."""
        self.steps = step
        if self.rate is not None:
            self.step_on_device.fill_(step)

    def step(self) -> None:
        """Set the next step's rate."""
        if self.rate is None:
            self._set(self.rates[self.steps])
            self.steps += 1
        else:
            torch.index_select(self.rates_on_device, 0, self.step_on_device, out=self.rate.view(1))
            self.step_on_device.add_(1)
