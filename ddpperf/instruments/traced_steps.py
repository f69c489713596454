"""Run training steps under torch's profiler, and report their communication, computation and idle time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch.distributed as dist

from ddpperf.measuring.trace_split import Event, split_of, trace_of
from ddpperf.training.measured_step import MeasuredStep, TrainingMeasurement

TRACED_STEPS = 5


class TracedSteps(TrainingMeasurement):
    """Measurement in which each step runs TRACED_STEPS training steps under torch's profiler."""

    max_iterations = 1
    training_steps = TRACED_STEPS
    operators = False  # whether a GPU's trace also has torch's operators on the CPU

    def __init__(self, training: MeasuredStep) -> None:
        super().__init__(training)
        self.device = training.training.device
        self.traced: list[dict[str, float]] = []  # the seconds of each trace by name

    def step(self) -> None:
        meet = dist.barrier if self.spec.grouped else None
        events = trace_of(self._train, self.device, meet=meet, operators=self.operators)
        if found := self.seconds_of(events):
            self.traced.append(found)

    def seconds_of(self, events: Sequence[Event]) -> dict[str, float]:
        """Return the seconds that a trace shows, by counter; nothing for a trace without work."""
        return split_of(events, met=self.spec.grouped and self.device.type == "cuda")

    def _train(self) -> None:
        for _ in range(TRACED_STEPS):
            self.training.step()

    def finish(self) -> dict[str, float]:
        """Return the communication, computation, copy and idle seconds of one training step.

        Each value is the median over all rounds. No values are returned if no profile can be made.
        exposed_comm_seconds: communication during which nothing is computed.
        """
        names = self.traced[0] if self.traced else ()
        return {name: median(found[name] for found in self.traced) / TRACED_STEPS for name in names}
