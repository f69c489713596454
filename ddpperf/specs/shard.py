"""Compute how many images each process trains on in an epoch, and in how many batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ddpperf.specs.spec import Spec


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The images that one process trains on in an epoch, and the number of its batches.

    All shards have the same size, as torch's DistributedSampler makes them. With drop_last some
    images are left out, otherwise some images are repeated. A batch larger than the shard is filled
    by repeating the shard's images.
    """

    epoch_images: int
    processes: int
    batch_size: int
    drop_last: bool

    @property
    def images(self) -> int:
        rest = 0 if self.drop_last else self.processes - 1
        return (self.epoch_images + rest) // self.processes

    @property
    def steps(self) -> int:
        whole, rest = divmod(self.images, self.batch_size)
        return max(1, whole if self.drop_last or not rest else whole + 1)

    @property
    def last_batch_size(self) -> int:
        rest = self.images % self.batch_size
        is_smaller = rest and self.images > self.batch_size and not self.drop_last
        return rest if is_smaller else self.batch_size


@dataclass(frozen=True, kw_only=True)
class SamplerSpec(Spec):
    """Measurement spec for the image indices that DistributedSampler gives each rank in an epoch.

    set_epoch: whether the sampler is given the number of each epoch. Without this number the images
    are in the same order in every epoch.
    """

    measurement: ClassVar[str] = "sampler"

    epoch_images: int
    set_epoch: bool = True  # type: ignore[misc]
    drop_last: bool = False

    @property
    def shard(self) -> Shard:
        """Return the images that each rank gets in an epoch, in one batch."""
        images, N, drop_last = self.epoch_images, self.world_size, self.drop_last
        shard = Shard(epoch_images=images, processes=N, batch_size=1, drop_last=drop_last)
        return replace(shard, batch_size=shard.images)
