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
SEEDS = {"train": 1, "test": 2}


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


def load_images(path: str | None, count: int, part: str = "train", *, coarse: bool = False) -> Images:
    """Return at most `count` images from `path`, or synthetic images if `path` is None.

    part: "train" or "test". coarse: whether synthetic images have coarse patterns, as whole
    training runs need them.
    """
    if path is None:
        return synthetic_images(count, SEEDS[part] if coarse else None)
    stored = torch.load(path, weights_only=True, mmap=True)
    return Images(pixels=stored[f"{part}_images"][:count], labels=stored[f"{part}_labels"][:count])


class EpochBatches:
    """Yields the image indices of each batch that one rank gets in an epoch.

    `set_epoch` chooses the epoch. torch's DistributedSampler chooses the rank's images. A batch
    larger than the rank's share of the images is filled by repeating images.
    """

    def __init__(self, shard: Shard, rank: int, *, seed: int = 0, set_epoch: bool = True) -> None:
        self.shard = shard
        self.sampler: DistributedSampler[int] = DistributedSampler(
            range(shard.epoch_images),  # type: ignore[arg-type]  # it reads the length only
            num_replicas=shard.processes,
            rank=rank,
            drop_last=shard.drop_last,
            seed=seed,
        )
        self._own_orders = set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose number determines the random order of the images.

        With set_epoch=False, all epochs have the order of epoch 0.
        """
        self.sampler.set_epoch(epoch if self._own_orders else 0)

    def __iter__(self) -> Iterator[list[int]]:
        indices = cycle(self.sampler)
        shard = self.shard
        for size in [shard.batch_size] * (shard.steps - 1) + [shard.last_batch_size]:
            yield list(islice(indices, size))
