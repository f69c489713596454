"""Specs that look inside a training step: a trace, its parts, its messages, a replay of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from ddpperf.specs.strategy import DDP_STRATEGIES, DELAYED_HOOKS
from ddpperf.specs.training import TrainingSpec

TRACES_VARIABLE = "DDPPERF_TRACES"  # environment variable of the ranks: the folder that keeps traces
PARTS = ("data", "forward", "backward", "gradient_sync", "optimizer")  # the parts of a step


@dataclass(frozen=True, kw_only=True)
class TraceSpec(TrainingSpec):
    """Some steps of the same training under the profiler; a round includes writing the trace.

    Raises ValueError for a training whose communication a trace cannot recognize.
    """

    measurement: ClassVar[str] = "training_trace"
    repeats: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy == "own_ddp" and self.maps_memory:
            raise ValueError(
                "a trace cannot tell own_ddp's copies from other copies, "
                "got comm_hook symmetric_memory; use none"
            )


@dataclass(frozen=True, kw_only=True)
class PartsSpec(TrainingSpec):
    """Steps of the same training in which every rank times the parts of a step.

    Raises ValueError for a strategy whose parts do not follow each other on one device.
    """

    measurement: ClassVar[str] = "training_parts"
    strategies: ClassVar[tuple[str, ...]] = ("single", *DDP_STRATEGIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy not in self.strategies:
            raise ValueError(
                f"a step's parts are timed of {', '.join(self.strategies)}, got {self.strategy}; use ddp"
            )


@dataclass(frozen=True, kw_only=True)
class MessagesSpec(TrainingSpec):
    """Steps of the same training whose messages are counted, each followed by a mean of the loss.

    Raises ValueError for a training without a process group, or one that is not executed eagerly.
    """

    measurement: ClassVar[str] = "training_messages"
    repeats: ClassVar[bool] = False
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grouped:
            raise ValueError(
                f"strategy {self.strategy} has no process group and sends nothing; use ddp, zero1 or fsdp"
            )
        if self.strategy == "own_ddp" and self.maps_memory:
            raise ValueError(
                "what own_ddp reads in mapped memory is no message, got comm_hook symmetric_memory; use none"
            )
        if self.execution != "eager":
            raise ValueError(
                f"messages are counted where torch dispatches them, got execution {self.execution}; use eager"
            )


@dataclass(frozen=True, kw_only=True)
class BucketReplaySpec(TrainingSpec):
    """The all_reduces of one training step's gradients, one after the other, and nothing else.

    Raises ValueError for a strategy other than DDP, or a hook that sends something else.
    """

    measurement: ClassVar[str] = "bucket_replay"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy != "ddp" or self.comm_hook not in DELAYED_HOOKS:
            raise ValueError(
                f"messages are replayed of ddp with hook {', '.join(DELAYED_HOOKS)}, "
                f"got {self.strategy} with {self.comm_hook}"
            )


Kind = TypeVar("Kind", TraceSpec, PartsSpec, BucketReplaySpec, MessagesSpec)


def measured_as(kind: type[Kind], spec: TrainingSpec) -> Kind:
    """Return another measurement of the same training, without its delay and fault."""
    training = {field.name: getattr(spec, field.name) for field in fields(TrainingSpec)}
    return kind(**training | {"delay_seconds": 0.0, "fault": None})
