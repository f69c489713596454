"""Measurement specs for one training step, and for one epoch of training steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from ddpperf.specs.base import require_at_least, require_one_of
from ddpperf.specs.model import is_custom_model, require_model
from ddpperf.specs.sampling import Shard
from ddpperf.specs.strategy import APART, DDP_OPTIONS, StrategyFields

Input = Literal["fixed", "device", "dataloader"]
# An environment variable of the ranks with the path of the data set's file, unless the data set is
# synthetic. A rank opens no other file that a message names.
DATA_VARIABLE = "DDPPERF_DATA"


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(StrategyFields):
    """Measurement spec for one optimizer step: forward, backward, gradient synchronization, update.

    model: a built-in model, `torchvision:NAME`, or a custom model as `package.module:function`.
    per_rank_batch_size: images per rank. The global batch is `world_size` times as large.
    input: "fixed" trains on one batch again and again. "device" crops and flips batches of a data
    set that is in the device's memory. "dataloader" loads batches with `loader_workers` processes.
    data: the name of the data set.
    digest: a hash of the data set's images.
    epoch_images: the number of images in an epoch.
    drop_last: whether to leave out a smaller last batch.
    Raises ValueError for a value that cannot be measured.
    """

    measurement: ClassVar[str] = "training_step"

    model: str = "resnet18"
    per_rank_batch_size: int
    input: Input = "fixed"
    loader_workers: int = 0
    data: str = "synthetic"
    digest: str = ""
    epoch_images: int = 1024
    drop_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_model(self.model)
        require_one_of("input", self.input, get_args(Input))
        require_at_least("per_rank_batch_size", self.per_rank_batch_size, 1)
        require_at_least("loader_workers", self.loader_workers, 0)
        require_at_least("epoch_images", self.epoch_images, self.world_size)
        if not (
            isinstance(self.data, str) and isinstance(self.digest, str) and isinstance(self.drop_last, bool)
        ):
            raise ValueError(
                "data and digest must be words and drop_last a bool, "
                f"got {self.data!r}, {self.digest!r}, {self.drop_last!r}"
            )
        if self.strategy == "single" and self.world_size != 1:
            raise ValueError(
                f"strategy single is one device, got world_size={self.world_size}; use world_size=1 or ddp"
            )
        self._require_batches()
        self._require_input()

    def _require_batches(self) -> None:
        parts = self.accumulation_steps
        for size in {self.process_batch_size, self._last_batch_size}:
            if size % parts:
                raise ValueError(
                    f"accumulation_steps={parts} does not divide a batch of {size} images; use a divisor"
                )
        if self.model == "resnet18" and self._least_batch_size < 2 * parts:
            in_parts = f" in {parts} parts" if parts > 1 else ""
            raise ValueError(
                "resnet18's last BatchNorm needs at least two images, "
                f"got a batch of {self._least_batch_size}{in_parts}; use batches of at least {2 * parts}"
            )
        if self.captured and self._last_batch_size != self.process_batch_size:
            raise ValueError(
                f"execution {self.execution} needs batches of one size, "
                "but an epoch's last batch is smaller; use drop_last"
            )

    def _require_input(self) -> None:
        if is_custom_model(self.model) and self.memory_format != "contiguous":
            raise ValueError(
                f"{self.model} has its own memory format, got {self.memory_format}; use contiguous"
            )
        if is_custom_model(self.model) and self.input != "fixed":
            raise ValueError(f"{self.model} makes its own batches, got input {self.input}; use input fixed")
        if self.loader_workers and self.input != "dataloader":
            raise ValueError(f"loader_workers={self.loader_workers} needs input dataloader, got {self.input}")
        if self.input == "dataloader" and self.repeats:
            raise ValueError(
                "a dataloader runs ahead between the rounds of a step; measure an epoch of it (EpochSpec)"
            )

    @property
    def busy_processes(self) -> int:
        """Return how many ranks and DataLoader workers are busy at the same time."""
        return super().busy_processes * (1 + self.loader_workers)

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.per_rank_batch_size

    @property
    def processes(self) -> int:
        """Return the number of processes that divide an epoch's images among themselves."""
        return self.world_size if self.grouped else 1

    @property
    def process_batch_size(self) -> int:
        """Return the number of images that one process trains on in one step."""
        return self.global_batch_size // self.processes

    @property
    def shard(self) -> Shard:
        """Return the part of an epoch's images that one process trains on."""
        return Shard(
            epoch_images=self.epoch_images,
            processes=self.processes,
            batch_size=self.process_batch_size,
            drop_last=self.drop_last,
        )

    @property
    def _last_batch_size(self) -> int:
        return self.process_batch_size if self.input == "fixed" else self.shard.last_batch_size

    @property
    def _least_batch_size(self) -> int:
        """Return the smallest number of images that any device gets in a step.

        DataParallel gives its last device what is left of a batch.
        """
        per_device = -(-self._last_batch_size // (self.world_size // self.processes))
        return min(self.per_rank_batch_size, self._last_batch_size % per_device or per_device)

    @property
    def steps_per_epoch(self) -> int:
        return self.shard.steps

    @property
    def images_per_epoch(self) -> int:
        """Return the number of images that all processes together train on in an epoch."""
        return self.processes * ((self.steps_per_epoch - 1) * self.process_batch_size + self._last_batch_size)

    @property
    def id(self) -> str:
        work = f"world_size={self.world_size}-batch={self.per_rank_batch_size}-{self.model}"
        execution = "+".join(filter(None, (self.execution, self.inductor)))
        workers = self.loader_workers if self.input == "dataloader" else ""
        return f"{work}-{self.strategy_id}-{self.precision}-{execution}-{self.input}{workers}"

    @property
    def needs_torchvision(self) -> bool:
        """Return whether the ranks import torchvision, for its models or its image transforms."""
        return self.model.startswith("torchvision:") or self.input == "dataloader"

    def ddp(self) -> Self:
        """Return a spec for the same training step by DDP with default options."""
        return self._plain(strategy="ddp", accumulation_steps=1)

    def one_device(self) -> Self:
        """Return a spec for the same training step on a single device.

        Its seconds are the single-device step time t(1) of a speedup.
        """
        return self._plain(world_size=1, strategy="single", delay_seconds=0.0, fault=None)

    def _plain(self, **fields: Any) -> Self:
        return dataclasses.replace(self, **{**DDP_OPTIONS, **APART, "sync_batch_norm": False, **fields})

    def no_sync(self) -> Self:
        """Return a spec for the same training step without any communication between the ranks."""
        return dataclasses.replace(self, communication="no_sync", buffer_sync=False)

    def local(self) -> Self:
        """Return a spec for the same training step where DDP fills buckets but sends nothing."""
        return dataclasses.replace(self, communication="local", buffer_sync=False)

    def eager(self) -> Self:
        """Return a spec for the same training step in eager mode (no compiling, no CUDA graph)."""
        return dataclasses.replace(self, execution="eager", inductor="")


@dataclass(frozen=True, kw_only=True)
class EpochSpec(TrainingSpec):
    """Measurement spec for one training epoch, from loading its first batch to its last update.

    The epoch is measured after a warm-up.
    """

    measurement: ClassVar[str] = "training_epoch"
    repeats: ClassVar[bool] = False

    def turns(self, size: int) -> list[list[int]]:
        """Return the groups of ranks that train together; on a single device only rank 0 trains.

        An epoch takes too long to be repeated by each rank.
        """
        return [[0]] if self.strategy == "single" else super().turns(size)
