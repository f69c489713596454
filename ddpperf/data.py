"""Synthetic images in the shape of CIFAR-10: seeded, and learnable."""

from __future__ import annotations

import torch
from torch import Tensor

IMAGE_SHAPE = (3, 32, 32)
NUM_CLASSES = 10


def synthetic_batch(batch_size: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Images float32 [batch_size, 3, 32, 32] and labels int64 [batch_size]: a pattern for each class, plus noise.

    The patterns are the same for every seed, so that a model learns from one batch what holds in another.
    """
    patterns = torch.randn(NUM_CLASSES, *IMAGE_SHAPE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed + 1)
    labels = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
    noise = torch.randn(batch_size, *IMAGE_SHAPE, generator=generator)
    return patterns[labels] + noise, labels
