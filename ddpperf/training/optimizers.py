"""Optimizers for large batches that torch does not have, or not for convolutions: LARS, LAMB and Muon.

All of their state and arithmetic is on the device, the learning rate too where it is a tensor, so that a graph can hold a step.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        super().__init__(
            parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients, momenta = with_momenta(self, group["params"])
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
    have SGD's step with Nesterov's momentum instead; of those, too, all but vectors decay, and beside the gradient.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "orthogonal": True}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = [each for each in group["params"] if each.ndim > 1 and group["orthogonal"]]
            others = [each for each in group["params"] if each.ndim <= 1 or not group["orthogonal"]]
            self._step_matrices(group, *with_momenta(self, matrices))
            self._step_plain(group, *with_momenta(self, others))

    def _step_plain(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]
    ) -> None:
        if not parameters:
            return
        if weights := [each for each in parameters if each.ndim > 1]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        updates = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
        torch._foreach_sub_(parameters, torch._foreach_mul(updates, group["lr"]))

    def _step_matrices(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]
    ) -> None:
        """Those of one shape are orthogonalized together: most are small, and their products launch more than they compute."""
        if not parameters:
            return
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = list(torch._foreach_lerp(gradients, momenta, group["momentum"]))
        alike: dict[torch.Size, list[int]] = {}
        for place, each in enumerate(parameters):
            alike.setdefault(each.shape, []).append(place)
        for shape, places in alike.items():
            stacked = torch.stack([updates[place].flatten(1) for place in places])
            scale = max(1.0, stacked.shape[1] / stacked.shape[2]) ** 0.5
            found = orthogonal(stacked).to(stacked.dtype) * (group["lr"] * scale)
            for place, update in zip(places, found, strict=True):
                updates[place] = update.reshape(shape)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(parameters, updates)


def with_momenta(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Those that have a gradient, their gradients, and their momenta, which begin at 0."""
    trained, gradients, momenta = [], [], []
    for each in parameters:
        if each.grad is not None:
            state = optimizer.state[each]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(each)
            trained.append(each)
            gradients.append(each.grad)
            momenta.append(state["momentum_buffer"])
    return trained, gradients, momenta


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
