"""What the ranks can measure, by the name that specs have for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ddpperf.collectives.calls import AllReduce, Collective
from ddpperf.data.sampling import Sampling
from ddpperf.instruments.bucket_replay import BucketReplay
from ddpperf.instruments.memory_copy import Copy
from ddpperf.instruments.message_ledger import CountedTraining
from ddpperf.instruments.step_parts import PartedTraining
from ddpperf.instruments.traced import TracedTraining
from ddpperf.specs import (
    AllReduceSpec,
    BucketReplaySpec,
    CollectiveSpec,
    CopySpec,
    EpochSpec,
    MessagesSpec,
    PartsSpec,
    RunSpec,
    SamplerSpec,
    TraceSpec,
    TrainingSpec,
)
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.run import TrainingRun
from ddpperf.training.step import TrainingStep


class Measurement(Protocol):
    """What can be repeated and timed; made from a spec, a rank and a device."""

    max_iterations: int

    def warm_up(self, steps: int) -> None:
        """Do what must be done before a step is like all others: `steps` steps, or what they need."""

    def start_round(self) -> None:
        """Prepare a round, untimed."""

    def step(self) -> None:
        """The timed work."""

    def end_round(self, steps: int) -> None:
        """Check the result of a round's `steps` steps, untimed; raises if it is wrong."""

    def finish(self) -> dict[str, float]:
        """Check what the rounds left, and give the rank's counters."""


MEASUREMENTS: dict[str, Callable[..., Measurement]] = {
    TrainingSpec.measurement: TrainingStep,
    EpochSpec.measurement: TrainingEpoch,
    SamplerSpec.measurement: Sampling,
    AllReduceSpec.measurement: AllReduce,
    CollectiveSpec.measurement: Collective,
    CopySpec.measurement: Copy,
    TraceSpec.measurement: TracedTraining,
    BucketReplaySpec.measurement: BucketReplay,
    MessagesSpec.measurement: CountedTraining,
    PartsSpec.measurement: PartedTraining,
    RunSpec.measurement: TrainingRun,
}
