"""What can be measured of sampling: how an epoch's images are split between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddpperf.specs.base import Work, require_at_least


@dataclass(frozen=True, kw_only=True)
class SamplerSpec(Work):
    """One epoch of DistributedSampler's indices on every rank, as the inputs of a training use it.

    set_epoch: whether each epoch is told its number, as it must be to be shuffled anew. Raises ValueError for less
    images than ranks.
    """

    measurement: ClassVar[str] = "sampler"

    epoch_images: int
    set_epoch: bool = True  # type: ignore[misc]
    drop_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("world_size", self.world_size, 1)
        require_at_least("epoch_images", self.epoch_images, self.world_size)

    @property
    def shard_images(self) -> int:
        """The images of one rank: as many on each, the rest left out, or filled up with images that another has."""
        return (
            self.epoch_images // self.world_size
            if self.drop_last
            else -(-self.epoch_images // self.world_size)
        )

    @property
    def id(self) -> str:
        told = "set_epoch" if self.set_epoch else "no_set_epoch"
        return f"world_size={self.world_size}-images={self.epoch_images}-{'drop_last' if self.drop_last else 'pad'}-{told}"
