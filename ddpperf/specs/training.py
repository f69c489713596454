"""Measurement specs for one training step, and for one epoch of training steps."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from ddpperf.errors import quoted
from ddpperf.specs.common_fields import Function, Positive, Rule, Rules
from ddpperf.specs.shard import Shard
from ddpperf.specs.strategy_fields import PLAIN_DDP, StrategyFields

Model = Literal["resnet18", "resnet18_cifar", "resnet50", "resnet50_cifar", "resnet10_cifar"]
IMAGENET_STEM: tuple[Model, ...] = ("resnet18", "resnet50")  # their last stage has one value per image
Input = Literal["fixed", "device", "dataloader"]
# An environment variable of the ranks with the path of the data set's file, unless the data set is
# synthetic. A rank opens no other file that a message names.
DATA_VARIABLE = "DDPPERF_DATA"


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(StrategyFields):
    """Measurement spec for one optimizer step: forward, backward, gradient synchronization, update.

    input: "fixed" trains on one batch again and again. "device" crops and flips batches of a data
    set that is in the device's memory. "dataloader" loads batches with `loader_workers` processes.
    """

    measurement: ClassVar[str] = "training_step"
    rules: ClassVar[Rules] = (
        Rule("strategy", ("single",), world_size=(1,)),
        Rule("loader_workers", input=("dataloader",)),
    )

    model: str = "resnet18"  # built in, `torchvision:NAME`, or custom as `package.module:function`
    per_rank_batch_size: Positive  # images; the global batch is `world_size` times as large
    input: Input = "fixed"
    loader_workers: int = 0
    data: str = "synthetic"  # the name of the data set
    digest: str = ""  # a hash of the data set's images
    epoch_images: int = 1024
    drop_last: bool = True  # whether to leave out a smaller last batch

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        require_model(self.model)
        N, images, model, parts = self.world_size, self.epoch_images, self.model, self.accumulation_steps
        if images < N:
            yield f"epoch_images must be a whole number of at least {N}, got {images}"
        batch, last, least = self.process_batch_size, self._last_batch_size, self._least_batch_size
        for size in {batch, last}:
            if size % parts:
                yield f"accumulation_steps={parts} does not divide a batch of {size} images; use a divisor"
        if model in IMAGENET_STEM and least < 2 * parts:
            found = f"got a batch of {least}{f' in {parts} parts' * (parts > 1)}"
            yield f"{model}'s last BatchNorm needs 2 images, {found}; use batches of at least {2 * parts}"
        if self.captured and last != batch:
            yield f"execution {self.execution} needs batches of one size; use drop_last"
        if is_custom_model(model) and (self.memory_format, self.input) != ("contiguous", "fixed"):
            found = f"got {self.memory_format} and {self.input}"
            yield f"{model} makes its own batches: use memory_format contiguous and input fixed, {found}"
        if self.input == "dataloader" and self.repeats:
            yield "a dataloader runs ahead between the rounds of a step; measure an epoch (EpochSpec)"

    @property
    def functions(self) -> tuple[str, ...]:
        return (self.model,) if is_custom_model(self.model) else ()

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
    def has_equal_batches(self) -> bool:
        """Return whether every batch of an epoch has the same number of images."""
        return self._last_batch_size == self.process_batch_size

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

    def ddp(self) -> Self:
        """Return a spec for the same training step by DDP with default options."""
        return dataclasses.replace(self, **PLAIN_DDP, strategy="ddp", accumulation_steps=1)

    def one_device(self) -> Self:
        """Return a spec for the same training step on a single device.

        Its seconds are the single-device step time t(1) of a speedup.
        """
        alone: dict[str, Any] = {"world_size": 1, "strategy": "single", "delay_seconds": 0.0, "fault": None}
        return dataclasses.replace(self, **PLAIN_DDP | alone)

    def no_sync(self) -> Self:
        """Return a spec for the same training step without any communication between the devices."""
        buffers: dict[str, Any] = {} if self.strategy == "data_parallel" else {"buffer_sync": False}
        return dataclasses.replace(self, communication="no_sync", **buffers)

    def local(self) -> Self:
        """Return a spec for the same training step where DDP fills buckets but sends nothing."""
        return dataclasses.replace(self, communication="local", buffer_sync=False)


@dataclass(frozen=True, kw_only=True)
class EpochSpec(TrainingSpec):
    """Measurement spec for one training epoch, from loading its first batch to its last update.

    The epoch is measured after a warm-up.
    """

    measurement: ClassVar[str] = "training_epoch"
    repeats: ClassVar[bool] = False


def is_custom_model(model: str) -> bool:
    """Return whether a model's name is that of a custom model: `package.module:function`."""
    return ":" in model and not model.startswith("torchvision:")


def require_model(model: str) -> None:
    """Raise ValueError unless a name is valid for a built-in, torchvision or custom model."""
    known = get_args(Model)
    patterns = "|".join((*known, r"torchvision:\w+", get_args(Function)[1]))
    if not re.fullmatch(patterns, model):
        other = "torchvision:NAME or package.module:function"
        raise ValueError(f"model must be one of {', '.join(known)}, {other}, got {quoted(model)}")
