"""Run training steps under torch's profiler, and report their communication, computation and idle time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch.distributed as dist

from ddpperf.analysis.intervals import without_waiting
from ddpperf.instruments.data_parallel_trace import mark_parts, seconds_by_part
from ddpperf.measuring.trace_split import ALL_REDUCE, Event, interval, messages_of, split_of, trace_of
from ddpperf.training.measured_step import MeasuredStep, TrainingMeasurement

TRACED_STEPS = 5


class TracedSteps(TrainingMeasurement):
    """Measurement in which each step runs TRACED_STEPS training steps under torch's profiler.

    A trace of DataParallel's steps has the work of all GPUs, and the operators that launch it.
    """

    max_iterations = 1
    training_steps = TRACED_STEPS

    def __init__(self, training: MeasuredStep) -> None:
        super().__init__(training)
        self.device = training.training.device
        self.traced: list[dict[str, float]] = []  # the seconds of each trace by name
        self.in_one_process = self.spec.strategy == "data_parallel"
        if self.in_one_process:
            mark_parts(training.training.model)

    def step(self) -> None:
        meet = dist.barrier if self.spec.grouped else None
        events = trace_of(self._train, self.device, meet=meet, operators=self.in_one_process)
        met = self.spec.grouped and self.device.type == "cuda"
        found = seconds_by_part(events) if self.in_one_process else split_of(events, met=met)
        if self.spec.grouped:
            ranks: list[Any] = [None] * self.spec.world_size
            dist.all_gather_object(ranks, messages_of(events, met=met))
            sending = sending_seconds(ranks)
            found = found | sending if sending else {}
        if found:
            self.traced.append(found)

    def _train(self) -> None:
        for _ in range(TRACED_STEPS):
            self.training.step()

    def finish(self) -> dict[str, float]:
        """Return the communication, computation, copy and idle seconds of one training step.

        Each value is the median over all rounds. No values are returned if no profile can be made.
        exposed_comm_seconds: communication during which nothing is computed.
        comm_without_waiting_seconds, all_reduce_without_waiting_seconds: how long the messages of all
        ranks take, without the time in which ranks wait for each other.
        """
        names = self.traced[0] if self.traced else ()
        return {name: median(found[name] for found in self.traced) / TRACED_STEPS for name in names}


def sending_seconds(messages: Sequence[Sequence[Event]]) -> dict[str, float]:
    """Return the seconds of all messages, and of the all_reduces, without waiting for other ranks.

    messages: the events of each rank's messages. Returns nothing if a rank's trace lacks messages.
    """
    if len(set(map(len, messages))) > 1:
        return {}
    kinds = {"comm": messages, "all_reduce": [list(filter(_is_all_reduce, sent)) for sent in messages]}
    return {
        f"{kind}_without_waiting_seconds": without_waiting([list(map(interval, sent)) for sent in ranks])
        for kind, ranks in kinds.items()
    }


def _is_all_reduce(event: Event) -> bool:
    return ALL_REDUCE.search(event["name"]) is not None
