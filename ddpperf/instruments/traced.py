"""A training under the profiler: what the time of its steps is spent on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from ddpperf.analysis.intervals import Split
from ddpperf.instruments.trace import split_of, trace_of
from ddpperf.specs import TRACES_VARIABLE, TraceSpec
from ddpperf.training.step import TrainingStep

TRACED_STEPS = 5


class TracedTraining(TrainingStep):
    """`step` trains `TRACED_STEPS` steps under a profiler, and keeps what their time was spent on."""

    max_iterations = 1

    def __init__(self, spec: TraceSpec, *, rank: int, device: torch.device) -> None:
        super().__init__(spec, rank=rank, device=device)
        self.splits: list[Split] = []
        self.path = kept_path(spec, rank)

    def step(self) -> None:
        grouped = self.spec.grouped
        events = trace_of(self.train_on, self.device, meet=dist.barrier if grouped else None, path=self.path)
        if (found := split_of(events, met=grouped and self.device.type == "cuda")) is not None:
            self.splits.append(found)

    def train_on(self) -> None:
        for _ in range(TRACED_STEPS):
            self.advance()

    def end_round(self, steps: int) -> None:
        super().end_round(steps * TRACED_STEPS)

    def finish(self) -> dict[str, float]:
        """Seconds of a step, medians over rounds; none where no profile can be had.

        comm_seconds: of any communication, all_reduce_seconds: of all_reduces alone, as gradients are sent;
        exposed_comm_seconds: of any communication beside which nothing computes. compute_seconds,
        copy_seconds, and idle_seconds of nothing of these. traced_step_seconds: of all.
        """
        if not self.splits:
            return {}
        parts = {
            "comm_seconds": [each.communication for each in self.splits],
            "all_reduce_seconds": [each.all_reduces for each in self.splits],
            "exposed_comm_seconds": [each.exposed for each in self.splits],
            "compute_seconds": [each.compute for each in self.splits],
            "copy_seconds": [each.copies for each in self.splits],
            "idle_seconds": [each.idle for each in self.splits],
            "traced_step_seconds": [each.whole for each in self.splits],
        }
        return {name: median(values) / TRACED_STEPS for name, values in parts.items()}


def kept_path(spec: TraceSpec, rank: int) -> Path | None:
    """Where the trace of the last round stays: in a folder of the training's own, which other tools take as it is; None if none
    was asked for. A set's ranks have a folder for temporary files that is called as the set is."""
    if (folder := os.environ.get(TRACES_VARIABLE)) is None:
        return None
    path = Path(folder, f"{spec.id}-{Path(tempfile.gettempdir()).name}", f"rank{rank}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
