"""Measurement specs for a training step's profiler trace, parts, messages and bucket replay."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from ddpperf.specs.spec import Rule, Rules
from ddpperf.specs.training_step import (
    DDP_STRATEGIES,
    DELAYED_HOOKS,
    GROUPED_STRATEGIES,
    EpochSpec,
    TrainingSpec,
)

# The parts of a training step. Only a step with a DataLoader has the part loading.
PARTS = ("loading", "data", "forward", "backward", "gradient_sync", "optimizer")
DATA_PARALLEL_PARTS = ("replicate", "scatter", "gather", "reduce")  # of DataParallel's communication


@dataclass(frozen=True, kw_only=True)
class TraceSpec(TrainingSpec):
    """Measurement spec for training steps that run under torch's profiler.

    A round includes writing the trace.
    """

    measurement: ClassVar[str] = "training_trace"
    repeats: ClassVar[bool] = False
    # A trace cannot tell own_ddp's copies through mapped memory from other copies.
    rules: ClassVar[Rules] = (Rule("strategy", ("own_ddp",), comm_hook=("none",)),)


@dataclass(frozen=True, kw_only=True)
class PartsSpec(TrainingSpec):
    """Measurement spec for training steps whose parts, such as forward and backward, are timed."""

    measurement: ClassVar[str] = "training_parts"
    # The parts of other strategies do not follow each other on one device.
    rules: ClassVar[Rules] = (Rule(strategy=("single", *DDP_STRATEGIES)),)


@dataclass(frozen=True, kw_only=True)
class EpochPartsSpec(EpochSpec, PartsSpec):
    """Measurement spec for an epoch in which the parts of all training steps are timed.

    A DataLoader can be measured only in whole epochs.
    """

    measurement: ClassVar[str] = "epoch_parts"


@dataclass(frozen=True, kw_only=True)
class MessagesSpec(TrainingSpec):
    """Measurement spec for training steps whose collectives and their bytes are counted.

    Each step ends with an all_reduce that averages the loss over all ranks.
    """

    measurement: ClassVar[str] = "training_messages"
    repeats: ClassVar[bool] = False
    counts: ClassVar[bool] = True
    rules: ClassVar[Rules] = (
        Rule(strategy=GROUPED_STRATEGIES, execution=("eager",)),
        Rule("strategy", ("own_ddp",), comm_hook=("none",)),  # reads of mapped memory are no messages
    )


@dataclass(frozen=True, kw_only=True)
class BucketReplaySpec(TrainingSpec):
    """Measurement spec for the all_reduces of one training step's gradients, without computation."""

    measurement: ClassVar[str] = "bucket_replay"
    rules: ClassVar[Rules] = (Rule(strategy=("ddp",), comm_hook=DELAYED_HOOKS),)


Kind = TypeVar("Kind", TrainingSpec, TraceSpec, PartsSpec, EpochPartsSpec, BucketReplaySpec, MessagesSpec)


def measured_as(kind: type[Kind], spec: TrainingSpec) -> Kind:
    """Return a measurement spec of the given class for the same training as `spec`.

    The new spec has no added delay. Raises ValueError if the rules of its class refuse
    the training.
    """
    training = {field.name: getattr(spec, field.name) for field in fields(TrainingSpec)}
    return kind(**training | {"delay_seconds": 0.0})
