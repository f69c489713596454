"""Optimizers for training: SGD, ZeRO's sharded SGD, and LARS, LAMB and Muon for large batches.

torch has no LARS and no LAMB, and its Muon does not take convolutions. All state and arithmetic is
on the device, and so is a learning rate that is a tensor. Therefore a CUDA graph can hold a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddpperf.specs import RunSpec, TrainingSpec
from ddpperf.training.models import trained_parameters
from ddpperf.training.schedules import PEAK_RATE

Tensors = list[Tensor]
# Keller Jordan's coefficients of a quintic iteration with the steepest slope at 0 (Muon 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
TRUST = 1e-3  # of LARS
SECOND_BETA, EPSILON = 0.999, 1e-6  # of LAMB


def optimizer_of(model: nn.Module, spec: TrainingSpec, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of a training recipe, or SGD with momentum for a spec without a recipe."""
    if isinstance(spec, RunSpec):
        return with_zero_momenta(_of_recipe(model, spec, device), spec)
    # torch 2.11 has no fused SGD for sharded parameters.
    fused = device.type == "cuda" and spec.strategy != "fsdp"
    settings: dict[str, Any] = {"lr": PEAK_RATE, "momentum": 0.9, "weight_decay": 5e-4, "fused": fused}
    if spec.strategy == "zero1":
        # Imported here, because the import is slow.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        settings["parameters_as_bucket_view"] = True
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **settings)
    return with_zero_momenta(torch.optim.SGD(model.parameters(), **settings), spec)


def with_zero_momenta(optimizer: torch.optim.Optimizer, spec: TrainingSpec) -> torch.optim.Optimizer:
    """Set the momentum of torch's fused SGD in fp16 to zero before its first step.

    Otherwise the first step makes the momentum of uninitialized memory, and does not write to it if a
    scaled gradient overflows. The later steps would train with what was in this memory.
    """
    if spec.precision == "fp16" and optimizer.defaults.get("fused"):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _of_recipe(model: nn.Module, spec: RunSpec, device: torch.device) -> torch.optim.Optimizer:
    """Return a training recipe's optimizer.

    Only SGD with decay_vectors has weight decay for biases and normalizations. Muon leaves the
    weight of the last layer, the classifier, to SGD.
    """
    trained = trained_parameters(model)
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    settings: dict[str, Any] = {"lr": spec.rate, "momentum": spec.momentum, "weight_decay": spec.weight_decay}
    if spec.optimizer == "lars":
        return Lars(trained, settings)
    if spec.optimizer == "lamb":
        return Lamb(trained, settings)
    if spec.optimizer == "muon":
        rest = [*weights[-1:], *vectors]
        groups = [{"params": weights[:-1], "orthogonal": True}, {"params": rest, "orthogonal": False}]
        return Muon(groups, settings)
    groups = [{"params": weights}, {"params": vectors, "weight_decay": 0.0}]
    if spec.decay_vectors:
        groups = [{"params": trained}]
    return torch.optim.SGD(groups, **settings, nesterov=spec.nesterov, fused=device.type == "cuda")


class Lars(torch.optim.Optimizer):
    """LARS optimizer, which is SGD with each layer's step proportional to its weights' norm.

    You, Gitman and Ginsburg 2017, algorithm 1: v = momentum v + lr TRUST |w| / (|g| + weight_decay
    |w|) (g + weight_decay w), w = w - v.
    defaults: lr, momentum and weight_decay. Vectors (biases and normalizations) have a plain step
    without weight decay. Implementations do so, but algorithm 1 does not.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients, momenta = with_momenta(self, group["params"])
            lr, decay = group["lr"], group["weight_decay"]
            norms = torch._foreach_norm(parameters), torch._foreach_norm(gradients)
            steps = []
            for parameter, gradient, weight, size in zip(parameters, gradients, *norms, strict=True):
                if parameter.ndim > 1:
                    local = TRUST * weight / (size + decay * weight)
                    local = torch.where((weight > 0) & (size > 0), local, 1.0)
                    steps.append(gradient.add(parameter, alpha=decay) * (local * lr))
                else:
                    steps.append(gradient * lr)
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, steps)
            torch._foreach_sub_(parameters, momenta)


class Lamb(torch.optim.Optimizer):
    """LAMB optimizer, which is Adam with each layer's step proportional to its weights' norm.

    You et al. 2020, algorithm 2: r = m / (sqrt(v) + EPSILON) + weight_decay w, w = w - lr |w| / |r|
    r, with m and v corrected for their start at 0.
    defaults: lr, momentum (beta of m) and weight_decay. The beta of v is SECOND_BETA. Vectors
    (biases and normalizations) have Adam's step without weight decay. With steps in proportion to
    their norm they would hardly move away from 0.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["momentum"], SECOND_BETA
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"].add_(1)
                state["first"].lerp_(parameter.grad, 1 - first)
                state["second"].lerp_(parameter.grad.square(), 1 - second)
                mean = state["first"] / (1 - first ** state["step"])
                variance = state["second"] / (1 - second ** state["step"])
                update = mean / (variance.sqrt() + EPSILON)
                rate = group["lr"]
                if parameter.ndim > 1:
                    update.add_(parameter, alpha=group["weight_decay"])
                    weight, size = parameter.norm(), update.norm()
                    rate = torch.where((weight > 0) & (size > 0), weight / size, 1.0) * rate
                parameter.sub_(update * rate)


class Muon(torch.optim.Optimizer):
    """Muon optimizer, which makes the momentum update of each weight matrix orthogonal.

    Jordan et al. 2024, with Nesterov's momentum: m = lerp(m, g, 1 - momentum), w = (1 - lr
    weight_decay) w - lr sqrt(max(1, rows / columns)) orthogonal(lerp(g, m, momentum)). The same as
    torch's Muon, which takes matrices only. Here a convolution's weight is a matrix with a row for
    each output.
    defaults: lr, momentum and weight_decay. Each group has a key `orthogonal`. If it is False, the
    group has SGD's step with Nesterov's momentum, and its matrices have decoupled weight decay.
    Vectors must be in such a group, and a classifier's last layer should be.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients, momenta = with_momenta(self, group["params"])
            rate, momentum = group["lr"], group["momentum"]
            if not parameters:
                continue
            if weights := [parameter for parameter in parameters if parameter.ndim > 1]:
                torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            torch._foreach_lerp_(momenta, gradients, 1 - momentum)
            updates = list(torch._foreach_lerp(gradients, momenta, momentum))
            if group["orthogonal"]:
                make_orthogonal(updates)
            else:
                rate = rate / (1 - momentum)  # SGD adds up gradients without the factor 1 - momentum
            torch._foreach_mul_(updates, rate)
            torch._foreach_sub_(parameters, updates)


def with_momenta(optimizer: torch.optim.Optimizer, parameters: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """Return the parameters that have a gradient, with their gradients and momentum buffers."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    states = [optimizer.state[parameter] for parameter in trained]
    for parameter, state in zip(trained, states, strict=True):
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    return trained, gradients, [state["momentum_buffer"] for state in states]


def make_orthogonal(updates: list[Tensor]) -> None:
    """Make updates orthogonal in place, those of one shape together to launch fewer kernels."""
    alike: dict[torch.Size, list[int]] = {}
    for place, update in enumerate(updates):
        alike.setdefault(update.shape, []).append(place)
    for shape, places in alike.items():
        stacked = torch.stack([updates[place].flatten(1) for place in places])
        scale = max(1.0, stacked.shape[1] / stacked.shape[2]) ** 0.5
        found = orthogonal(stacked).to(stacked.dtype) * scale
        for place, update in zip(places, found, strict=True):
            updates[place] = update.reshape(shape)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return nearly orthogonal matrices for a batch of matrices of shape [N, rows, columns].

    The Newton-Schulz iteration in bfloat16 brings the singular values near 1.
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
