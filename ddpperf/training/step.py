"""Make one step of data-parallel training: data, forward, backward, synchronization, update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ddpperf.data.inputs import Input
from ddpperf.measuring.compile_and_capture import compiled
from ddpperf.specs import RunSpec, TrainingSpec
from ddpperf.specs.training_step import gpu_reason
from ddpperf.training.model_and_data import model_and_data
from ddpperf.training.models import Loss
from ddpperf.training.optimizers import optimizer_of
from ddpperf.training.schedules import Schedule, rates_of
from ddpperf.training.strategies import AUTOCAST_DTYPES, gradient_bytes, parallelize, synchronization


class TrainingStep:
    """The model, the optimizer and the input data with which one rank makes training steps.

    Every rank starts from the same parameters and has its own batches. Equal parameters after some
    steps therefore show that the gradients were synchronized.
    loss: computes the loss from outputs and targets. The default is the loss of the spec's model.
    enter: called with the name of each part of a step when that part begins. Raises ValueError if
    the device cannot do what the spec asks for.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        *,
        rank: int,
        device: torch.device,
        loss: Loss | None = None,
        enter: Callable[[str], None] = lambda part: None,
    ) -> None:
        if reason := gpu_reason(spec, device.type):
            raise ValueError(reason)
        self.spec, self.device, self.enter = spec, device, enter
        self.module, self.input, usual_loss = model_and_data(spec, rank, device)
        allow_tf32(spec.precision == "tf32")  # now: the function of a custom model may have changed it
        self.loss_function = loss or usual_loss
        self.model = parallelize(self.module, spec, device)
        self.optimizer = optimizer_of(self.model, spec, device)
        self.schedule = Schedule(self.optimizer, rates_of(spec), device if spec.captured else None)
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.loss = torch.empty((), device=device)
        self.take = self.input.take
        self.forward: Callable[[Any, Tensor], Tensor] = self.loss_on
        if spec.compiled:
            half = gradient_bytes(self.module) // 2 if spec.strategy == "own_ddp" else 0
            self.forward = compiled(self.loss_on, spec.inductor, part_bytes=half)
            if spec.input == "device":
                self.take = compiled(self.input.take, spec.inductor)

    def with_input(self, input: Input) -> TrainingStep:
        """Return a training step for the same model and optimizer that reads other input data."""
        other = copy.copy(self)
        other.input, other.take = input, input.take
        return other

    def train(self) -> None:
        """Make one optimizer step on the batch that was loaded last."""
        self.enter("data")
        inputs, targets = self.take()
        self.enter("optimizer")
        self.schedule.step()
        self.optimizer.zero_grad()
        parts = self.spec.accumulation_steps
        # OwnDDP sums gradients over the ranks. DistributedDataParallel averages them itself.
        weight = 1 / (parts * (self.spec.world_size if self.spec.strategy == "own_ddp" else 1))
        losses = []
        for number, part in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
            is_last = number == parts - 1 and self.spec.communication != "no_sync"
            with synchronization(self.model, last=is_last):
                self.enter("forward")
                loss = self.forward(*part)
                self.enter("backward")
                scaled = self.scaler.scale(loss)
                scaled.backward(None if weight == 1 else torch.full_like(scaled, weight))
            losses.append(loss.detach())
        self.enter("optimizer")
        if isinstance(self.spec, RunSpec) and self.spec.clip_norm:
            self.scaler.unscale_(self.optimizer)  # or the scaled gradients would be clipped
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.loss = losses[0] if parts == 1 else torch.stack(losses).mean()

    def loss_on(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the model's mean loss on a batch of inputs and targets."""
        with self.autocast():
            return self.loss_function(self.model(inputs), targets)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for the precision of a training spec.

        For a CUDA graph autocast caches no casted weights, because each replay would reuse those of
        the capture.
        """
        dtype, cached = AUTOCAST_DTYPES.get(self.spec.precision), not self.spec.captured
        return torch.autocast(self.device.type, dtype, dtype is not None, cache_enabled=cached)


def allow_tf32(allowed: bool) -> None:
    """Switch TF32 on or off for matrix products and convolutions. A CPU gets all bits of fp32.

    Convolutions use TF32 by default, and torch 2.11's common setting does not change that.
    """
    backends: Any = torch.backends
    torch.set_float32_matmul_precision("high" if allowed else "highest")  # a compiler asks for this one
    backends.mkldnn.conv.fp32_precision = "ieee"
    backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
