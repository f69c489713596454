"""What can be measured of a training step's communication: a trace, its parts, its messages, and these by themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from ddpperf.specs.strategy import DDP_STRATEGIES, DELAYED_HOOKS
from ddpperf.specs.training import TrainingSpec

TRACES_VARIABLE = "DDPPERF_TRACES"  # of a rank's environment: the folder in which traces are kept
PARTS = ("data", "forward", "backward", "gradient_sync", "optimizer")  # of a step


@dataclass(frozen=True, kw_only=True)
class TraceSpec(TrainingSpec):
    """Some steps of the same training under the profiler; what a round takes includes writing the trace.

    Raises ValueError for a training whose communication a trace does not show as such.
    """

    measurement: ClassVar[str] = "training_trace"
    repeats: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy == "own_ddp" and self.maps_memory:
            raise ValueError(
                "a trace does not tell own_ddp's copies from others, got comm_hook symmetric_memory; use none"
            )


@dataclass(frozen=True, kw_only=True)
class PartsSpec(TrainingSpec):
    """Steps of the same training whose parts are timed, each rank's by itself.

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
    """Steps of the same training whose messages are counted, each followed by a mean of the loss over all ranks.

    Raises ValueError for a training without a process group, or a form that does not say what it sends while it runs.
    """

    measurement: ClassVar[str] = "training_messages"
    repeats: ClassVar[bool] = False
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grouped:
            raise ValueError(
                f"strategy {self.strategy} has no process group, so that nothing is sent; use ddp, zero1 or fsdp"
            )
        if self.strategy == "own_ddp" and self.maps_memory:
            raise ValueError(
                "what own_ddp reads in mapped memory is no message, got comm_hook symmetric_memory; use none"
            )
        if self.execution != "eager":
            raise ValueError(
                f"messages are counted where torch dispatches them, got form {self.execution}; use eager"
            )


@dataclass(frozen=True, kw_only=True)
class BucketReplaySpec(TrainingSpec):
    """The all_reduces that one step of the training makes of its gradients, one after the other, and nothing else.

    Raises ValueError for another strategy than DDP, or a hook that sends something else.
    """

    measurement: ClassVar[str] = "bucket_replay"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy != "ddp" or self.comm_hook not in DELAYED_HOOKS:
            hooks = ", ".join(DELAYED_HOOKS)
            raise ValueError(
                f"messages are replayed of ddp with hook {hooks}, got {self.strategy} with {self.comm_hook}"
            )


Kind = TypeVar("Kind", TraceSpec, PartsSpec, BucketReplaySpec, MessagesSpec)


def measured_as(kind: type[Kind], spec: TrainingSpec) -> Kind:
    """Another measurement of the same training, without a delay or a fault that was put into its steps."""
    training = {field.name: getattr(spec, field.name) for field in fields(TrainingSpec)}
    return kind(**training | {"delay_seconds": 0.0, "fault": None})
