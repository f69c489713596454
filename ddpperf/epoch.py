"""The same training, an epoch of steps at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ddpperf.specs import TrainingSpec
from ddpperf.training import TrainingStep

REPORT_SECONDS = 1.0


class TrainingEpoch(TrainingStep):
    """The same training, an epoch at a time. after_step: called after each step. report: told the fraction done, about once a
    second."""

    def __init__(self, spec: TrainingSpec, *, rank: int, device: torch.device) -> None:
        super().__init__(spec, rank=rank, device=device)
        self.after_step: Callable[[], None] = lambda: None
        self.report: Callable[[float], None] = lambda fraction: None

    def warm_up(self, steps: int) -> None:
        """The first epoch; where each step is the same work, and no loader must start, a few are as good: at most an epoch,
        or as many as a capture needs."""
        same = self.spec.input == "fixed" or (self.spec.captured and self.spec.input == "device")
        if same or self.spec.captured:
            super().warm_up(min(steps, self.spec.steps_per_epoch))
        if not same:
            self.step()

    def step(self) -> None:
        reported = time.monotonic()
        for number in range(self.spec.steps_per_epoch):
            self.advance()
            self.after_step()
            if (now := time.monotonic()) - reported > REPORT_SECONDS:
                self.report((number + 1) / self.spec.steps_per_epoch)
                reported = now
        self.input.prepare(self.epoch)  # while the device still trains

    def end_round(self, steps: int) -> None:
        super().end_round(steps * self.spec.steps_per_epoch)
