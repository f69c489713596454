"""Optimizers for large batches that torch does not have, or not for convolutions: LARS, LAMB and Muon.

All of their state and arithmetic is on the device, the learning rate too where it is a tensor, so that a graph can hold a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Keller Jordan's coefficients of a quintic iteration, whose slope at 0 is as steep as can be (Muon 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Lars(torch.optim.Optimizer):
    """SGD with momentum, whose step in each layer is in proportion to the layer's weights (You, Gitman and Ginsburg 2017,
    algorithm 1): v = momentum v + lr trust |w| / (|g| + weight_decay |w|) (g + weight_decay w), w = w - v.

    Vectors, which are biases and normalizations, have a plain step without weight decay: unlike in algorithm 1, but as its
    implementations do.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients, momenta = self._stepped(group)
            layers = [each for each, parameter in enumerate(parameters) if parameter.ndim > 1]
            vectors = [each for each, parameter in enumerate(parameters) if parameter.ndim <= 1]
            lr, decay = group["lr"], group["weight_decay"]
            steps = list(gradients)
            for each in vectors:
                steps[each] = gradients[each] * lr
            if layers:
                weights = torch._foreach_norm([parameters[each] for each in layers])
                sizes = torch._foreach_norm([gradients[each] for each in layers])
                for each, weight, size in zip(layers, weights, sizes, strict=True):
                    local = group["trust"] * weight / (size + decay * weight)
                    local = torch.where((weight > 0) & (size > 0), local, 1.0)
                    steps[each] = gradients[each].add(parameters[each], alpha=decay) * (local * lr)
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, steps)
            torch._foreach_sub_(parameters, momenta)

    def _stepped(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        parameters = [each for each in group["params"] if each.grad is not None]
        for each in parameters:
            if "momentum_buffer" not in self.state[each]:
                self.state[each]["momentum_buffer"] = torch.zeros_like(each)
        return parameters, [each.grad for each in parameters], [self.state[each]["momentum_buffer"] for each in parameters]


class Lamb(torch.optim.Optimizer):
    """Adam, whose step in each layer is as long as the layer's weights times the rate (You et al. 2020, algorithm 2):
    r = m / (sqrt(v) + eps) + weight_decay w, w = w - lr |w| / |r| r, with m and v corrected for their start at 0.

    Vectors, which are biases and normalizations, have Adam's step without weight decay: from 0 they would hardly move.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
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
                update = mean / (variance.sqrt() + group["eps"])
                ratio: Tensor | float = 1.0
                if parameter.ndim > 1:
                    update.add_(parameter, alpha=group["weight_decay"])
                    weight, size = parameter.norm(), update.norm()
                    ratio = torch.where((weight > 0) & (size > 0), weight / size, 1.0)
                parameter.sub_(update * (ratio * group["lr"]))


class Muon(torch.optim.Optimizer):
    """Momentum whose update of each matrix is orthogonalized, so that all of its directions are learned alike (Jordan et al.
    2024). On matrices it is torch's Muon, which takes no others; a convolution's weight is a matrix with a row for each output.

    Nesterov's momentum m = lerp(m, g, 1 - momentum), w = (1 - lr weight_decay) w - lr sqrt(max(1, rows / columns))
    orthogonal(lerp(g, m, momentum)). Vectors, and groups that are not `orthogonal`, as a classifier's last layer should not be,
    have SGD's step with Nesterov's momentum instead, vectors without weight decay.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "orthogonal": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                if parameter.ndim > 1 and group["orthogonal"]:
                    alike.setdefault(parameter.shape, []).append(parameter)
                else:
                    self._step_plain(parameter, group)
            for same in alike.values():
                self._step_matrices(same, group)

    def _step_plain(self, parameter: Tensor, group: dict[str, Any]) -> None:
        momentum, gradient = self.state[parameter]["momentum_buffer"], parameter.grad
        assert gradient is not None
        if parameter.ndim > 1:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        momentum.mul_(group["momentum"]).add_(gradient)
        parameter.sub_(gradient.add(momentum, alpha=group["momentum"]) * group["lr"])

    def _step_matrices(self, same: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Those of one shape together: most of a network's are small, and their products launch more than they compute."""
        updates = []
        for each in same:
            assert each.grad is not None
            momentum = self.state[each]["momentum_buffer"].lerp_(each.grad, 1 - group["momentum"])
            updates.append(each.grad.lerp(momentum, group["momentum"]).flatten(1))
        rows, columns = updates[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for each, update in zip(same, orthogonal(torch.stack(updates)), strict=True):
            each.mul_(1 - group["lr"] * group["weight_decay"])
            each.sub_(update.reshape(each.shape).to(each.dtype) * (group["lr"] * scale))


def orthogonal(matrices: Tensor) -> Tensor:
    """Each of [N, rows, columns] with all of its singular values near 1, by Newton and Schulz' iteration in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
