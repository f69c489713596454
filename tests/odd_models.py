"""Models that people bring and that torch's strategies treat in special ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ddpperf.training.models import Loss, MakeBatch

NAMES = ("lazy", "checkpointed", "communicating", "set_by_first_batch", "uncompiled", "with_spare")
ODD_MODELS = {name: f"{__name__}:{name}" for name in NAMES}
Made = tuple[nn.Module, MakeBatch, Loss]


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 32), torch.randint(10, (size,))


def lazy() -> Made:
    """Return a model whose layers have no parameters before the first batch."""
    return nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(10)), batch, cross_entropy


class Checkpointed(nn.Module):
    """Model whose last layers run again in a backward pass within the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.head, self.stem(x), use_reentrant=True)


def checkpointed() -> Made:
    return Checkpointed(), batch, cross_entropy


class SetByFirstBatch(nn.Module):
    """Model that sets one of its parameters from its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale, self.ready = nn.Linear(32, 10), nn.Parameter(torch.ones(32)), False

    def forward(self, x: Tensor) -> Any:
        if not self.ready:
            self.ready = True
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
        return self.head(x * self.scale)


def set_by_first_batch() -> Made:
    return SetByFirstBatch(), batch, cross_entropy


class _Mean(torch.autograd.Function):
    """The mean over all ranks, whose gradient is the mean of all gradients."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return _averaged(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return _averaged(gradient)


def _averaged(x: Tensor) -> Tensor:
    if not dist.is_initialized():
        return x.clone()
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x.contiguous())
    return torch.stack(gathered).mean(0)


class Communicating(nn.Module):
    """Model that gathers its activations from all ranks, forward and backward.

    From its second step on, it also sums the number of its steps over the ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, 64), nn.Linear(64, 10)
        self.steps = torch.zeros(1)

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        if dist.is_initialized() and self.steps > 1:
            dist.all_reduce(self.steps)
        return self.head(_Mean.apply(self.stem(x)))


def communicating() -> Made:
    return Communicating(), batch, cross_entropy


class Uncompiled(nn.Linear):
    """Layer that torch.compile leaves out."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def uncompiled() -> Made:
    return Uncompiled(32, 10), batch, cross_entropy


def with_spare() -> Made:
    """Return a model with a layer that no step uses."""
    model = nn.Sequential(nn.Linear(32, 10))
    model[0].register_module("spare", nn.Linear(2, 2))
    return model, batch, cross_entropy
