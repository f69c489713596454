"""Training and test images, and the batches of images that each rank gets in an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DistributedSampler

from ddpperf.specs import Shard

IMAGE_SHAPE = (3, 32, 32)
NUM_CLASSES = 10
TRAIN_SEED, TEST_SEED = 1, 2


@dataclass(frozen=True, kw_only=True)
class Images:
    """Tensors of images and of their labels. pixels: uint8 [N, 3, H, W]. labels: int64 [N]."""

    pixels: Tensor
    labels: Tensor


@lru_cache(maxsize=1)
def synthetic_images(count: int) -> Images:
    """Generate `count` seeded images of CIFAR-10's shape from class patterns and noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(128, (NUM_CLASSES, *IMAGE_SHAPE), generator=generator, dtype=torch.uint8)
    return _with_noise(patterns, count, generator)


@lru_cache(maxsize=2)
def coarse_images(count: int, seed: int) -> Images:
    """Generate `count` images with coarse class patterns, which survive random crops and flips.

    Another seed gives other images with the same patterns.
    """
    generator = torch.Generator().manual_seed(0)
    points = torch.randint(128, (NUM_CLASSES, IMAGE_SHAPE[0], 4, 4), generator=generator).float()
    patterns = F.interpolate(points, IMAGE_SHAPE[1:], mode="bilinear").to(torch.uint8)
    return _with_noise(patterns, count, torch.Generator().manual_seed(seed))


def _with_noise(patterns: Tensor, count: int, generator: torch.Generator) -> Images:
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    pixels = torch.randint(128, (count, *IMAGE_SHAPE), generator=generator, dtype=torch.uint8)
    return Images(pixels=pixels.add_(patterns[labels]), labels=labels)


def load_images(path: str | None, count: int) -> Images:
    """Return at most `count` training images from `path`, or synthetic images if `path` is None."""
    return synthetic_images(count) if path is None else _stored(path, "train", count)


def load_run_images(path: str | None, count: int) -> Images:
    """Return at most `count` training images for a whole training run.

    Without a path, the images are synthetic and have coarse patterns.
    """
    return coarse_images(count, TRAIN_SEED) if path is None else _stored(path, "train", count)


def load_test_images(path: str | None, count: int) -> Images:
    """Return at most `count` test images for a whole training run.

    Without a path, the images are synthetic and have coarse patterns.
    """
    return coarse_images(count, TEST_SEED) if path is None else _stored(path, "test", count)


def _stored(path: str, part: str, count: int) -> Images:
    stored = torch.load(path, weights_only=True, mmap=True)
    return Images(pixels=stored[f"{part}_images"][:count], labels=stored[f"{part}_labels"][:count])


class EpochBatches:
    """Yields the image indices of each batch that one rank gets in an epoch.

    `set_epoch` chooses the epoch. torch's DistributedSampler chooses the rank's images. A batch
    larger than the rank's share of the images is filled by repeating images.
    """

    def __init__(
        self,
        images: int,
        *,
        world_size: int,
        rank: int,
        batch_size: int,
        drop_last: bool,
        seed: int = 0,
        set_epoch: bool = True,
    ) -> None:
        self.shard = Shard(
            epoch_images=images, processes=world_size, batch_size=batch_size, drop_last=drop_last
        )
        places = range(images)
        self.sampler: DistributedSampler[int] = DistributedSampler(
            places,  # type: ignore[arg-type]  # it reads the length only
            num_replicas=world_size,
            rank=rank,
            drop_last=drop_last,
            seed=seed,
        )
        self._own_orders = set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose number determines the random order of the images.

        With set_epoch=False, all epochs have the order of epoch 0.
        """
        self.sampler.set_epoch(epoch if self._own_orders else 0)

    def __iter__(self) -> Iterator[list[int]]:
        indices = cycle(list(self.sampler))
        for number in range(self.shard.steps):
            is_last = number == self.shard.steps - 1
            yield list(islice(indices, self.shard.last_batch_size if is_last else self.shard.batch_size))
