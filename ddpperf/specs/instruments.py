"""Measurement specs for a training step's profiler trace, parts, messages and bucket replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from ddpperf.specs.strategy_fields import DDP_STRATEGIES, DELAYED_HOOKS
from ddpperf.specs.training import EpochSpec, TrainingSpec

# The parts of a training step. Only a step with a DataLoader has the part loading.
PARTS = ("loading", "data", "forward", "backward", "gradient_sync", "optimizer")
DATA_PARALLEL_PARTS = ("replicate", "scatter", "gather", "reduce")  # of DataParallel's communication


@dataclass(frozen=True, kw_only=True)
class TraceSpec(TrainingSpec):
    """Measurement spec for training steps that run under torch's profiler.

    A round includes writing the trace. Raises ValueError for a training whose communication cannot
    be recognized in a trace.
    """

    measurement: ClassVar[str] = "training_trace"
    repeats: ClassVar[bool] = False

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.strategy == "own_ddp" and self.maps_memory:
            yield "a trace cannot tell own_ddp's copies from other copies; use comm_hook none"


@dataclass(frozen=True, kw_only=True)
class PartsSpec(TrainingSpec):
    """Measurement spec for training steps whose parts, such as forward and backward, are timed.

    Raises ValueError for a strategy whose parts do not follow each other on one device.
    """

    measurement: ClassVar[str] = "training_parts"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        known, found = ("single", *DDP_STRATEGIES), self.strategy
        if found not in known:
            yield f"a step's parts are timed for strategy {', '.join(known)}, got {found}; use ddp"


@dataclass(frozen=True, kw_only=True)
class EpochPartsSpec(EpochSpec, PartsSpec):
    """Measurement spec for an epoch in which the parts of all training steps are timed.

    A DataLoader can be measured only in whole epochs.
    """

    measurement: ClassVar[str] = "epoch_parts"


@dataclass(frozen=True, kw_only=True)
class MessagesSpec(TrainingSpec):
    """Measurement spec for training steps whose collectives and their bytes are counted.

    Each step ends with an all_reduce that averages the loss over all ranks. Raises ValueError for a
    training without a process group or with an execution mode other than eager.
    """

    measurement: ClassVar[str] = "training_messages"
    repeats: ClassVar[bool] = False
    counts: ClassVar[bool] = True

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        strategy, execution = self.strategy, self.execution
        if not self.grouped:
            yield f"strategy {strategy} has no process group and sends nothing; use ddp, zero1 or fsdp"
        if strategy == "own_ddp" and self.maps_memory:
            yield "own_ddp's reads of mapped memory are no messages that count; use comm_hook none"
        if execution != "eager":
            yield f"messages are counted where torch dispatches them, got execution {execution}; use eager"


@dataclass(frozen=True, kw_only=True)
class BucketReplaySpec(TrainingSpec):
    """Measurement spec for the all_reduces of one training step's gradients, without computation.

    Raises ValueError for a strategy other than DDP, or for a communication hook that sends other
    messages.
    """

    measurement: ClassVar[str] = "bucket_replay"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.strategy != "ddp" or self.comm_hook not in DELAYED_HOOKS:
            needed = f"strategy ddp with comm_hook {', '.join(DELAYED_HOOKS)}"
            yield f"a bucket replay needs {needed}, got {self.strategy} with {self.comm_hook}"


Kind = TypeVar("Kind", TraceSpec, PartsSpec, EpochPartsSpec, BucketReplaySpec, MessagesSpec)


def measured_as(kind: type[Kind], spec: TrainingSpec) -> Kind:
    """Return a measurement spec of the given class for the same training as `spec`.

    The new spec has no added delay and no fault.
    """
    training = {field.name: getattr(spec, field.name) for field in fields(TrainingSpec)}
    return kind(**training | {"delay_seconds": 0.0, "fault": None})
