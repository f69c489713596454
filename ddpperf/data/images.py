"""Training and test images: synthetic ones, or those of a file that ddpperf/data/decode.py has made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpperf.specs import RunSpec, TrainingSpec
from ddpperf.specs.training_step import DATA_VARIABLE

IMAGE_SHAPE = (3, 32, 32)
NUM_CLASSES = 10
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
SEEDS = {"train": 1, "test": 2}
# of CIFAR-10, by channel, for values from 0 to 1
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, kw_only=True)
class Images:
    """Tensors of images and of their labels. pixels: uint8 [N, 3, H, W]. labels: int64 [N]."""

    pixels: Tensor
    labels: Tensor


@lru_cache(maxsize=2)
def synthetic_images(count: int, coarse_seed: int | None = None) -> Images:
    """Generate `count` seeded images of CIFAR-10's shape from class patterns and noise.

    coarse_seed: if given, the patterns are coarse, so that they survive random crops and flips.
    Another seed gives other images with the same patterns.
    """
    generator = torch.Generator().manual_seed(0)
    if coarse_seed is None:
        patterns = torch.randint(128, (NUM_CLASSES, *IMAGE_SHAPE), generator=generator, dtype=torch.uint8)
    else:
        points = torch.randint(128, (NUM_CLASSES, IMAGE_SHAPE[0], 4, 4), generator=generator).float()
        patterns = F.interpolate(points, IMAGE_SHAPE[1:], mode="bilinear").to(torch.uint8)
        generator.manual_seed(coarse_seed)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    pixels = torch.randint(128, (count, *IMAGE_SHAPE), generator=generator, dtype=torch.uint8)
    return Images(pixels=pixels.add_(patterns[labels]), labels=labels)


def load_images(spec: TrainingSpec, part: str = "train") -> Images:
    """Return the first images of a spec's data set, or synthetic images.

    part: "train" or "test". Only whole trainings, which are evaluated, have test images. For them,
    synthetic images have coarse patterns.
    """
    count = spec.test_images if isinstance(spec, RunSpec) and part == "test" else spec.epoch_images
    if spec.data == "synthetic":
        return synthetic_images(count, SEEDS[part] if isinstance(spec, RunSpec) else None)
    stored = torch.load(os.environ[DATA_VARIABLE], weights_only=True, mmap=True)
    return Images(pixels=stored[f"{part}_images"][:count], labels=stored[f"{part}_labels"][:count])


def normalized(pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Convert uint8 images [N, 3, H, W] to float32 with about zero mean and unit variance.

    The mean and the standard deviation are those of CIFAR-10.
    """
    mean = torch.tensor(MEAN, device=pixels.device).view(3, 1, 1) * 255
    std = torch.tensor(STD, device=pixels.device).view(3, 1, 1) * 255
    return ((pixels - mean) / std).contiguous(memory_format=memory_format)
