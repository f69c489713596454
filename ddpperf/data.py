"""Images to train on, and how an epoch splits them between ranks: the one rule that every input follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

IMAGE_SHAPE = (3, 32, 32)
NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Images:
    """pixels: uint8 [N, 3, H, W]; labels: int64 [N]."""

    pixels: Tensor
    labels: Tensor


@lru_cache(maxsize=1)
def synthetic_images(count: int) -> Images:
    """Seeded images in the shape of CIFAR-10 that can be learned: a pattern for each class, half hidden under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(128, (NUM_CLASSES, *IMAGE_SHAPE), generator=generator, dtype=torch.uint8)
    labels = torch.randint(NUM_CLASSES, (count,), generator=generator)
    pixels = torch.randint(128, (count, *IMAGE_SHAPE), generator=generator, dtype=torch.uint8)
    return Images(pixels=pixels.add_(patterns[labels]), labels=labels)


def load_images(path: str | None, count: int) -> Images:
    """The first `count` training images, of the cached tensor file at `path`, or synthetic ones; less if it has less."""
    if path is None:
        return synthetic_images(count)
    stored = torch.load(path, weights_only=True, mmap=True)
    return Images(pixels=stored["train_images"][:count], labels=stored["train_labels"][:count])


class EpochBatches:
    """The indices of each batch of one rank's shard of an epoch: DistributedSampler's shard, cut into batches.

    A batch larger than the shard wraps around: it repeats the shard's images, as often as it takes. Iterating gives the
    batches of the epoch that `set_epoch` named last, a list of indices each.
    """

    def __init__(self, images: int, *, world_size: int, rank: int, batch_size: int, drop_last: bool) -> None:
        self.batch_size = batch_size
        self.drop_last = drop_last
        places = range(images)
        self.sampler: DistributedSampler[int] = DistributedSampler(
            places,  # type: ignore[arg-type]  # only its length is read
            num_replicas=world_size,
            rank=rank,
            drop_last=drop_last,
        )

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        shard = list(self.sampler)
        if len(shard) < self.batch_size:
            shard = (shard * -(-self.batch_size // len(shard)))[: self.batch_size]
        whole = len(shard) // self.batch_size * self.batch_size
        for first in range(0, whole if self.drop_last else len(shard), self.batch_size):
            yield shard[first : first + self.batch_size]
