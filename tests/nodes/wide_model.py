"""A model whose gradients take longer to send than to compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 1000


def wide() -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]:
    """Return a module of 4 million parameters, a function that makes a batch, and the loss."""
    module = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, WIDTH), torch.randint(WIDTH, (batch_size,))

    return module, make_batch, nn.functional.cross_entropy
