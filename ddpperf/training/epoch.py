"""The same training, an epoch of steps at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from ddpperf.specs import TrainingSpec
from ddpperf.training.step import TrainingStep

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
        for _ in self.reported(self.spec.steps_per_epoch):
            self.advance()
        self.input.prepare(self.epoch)  # while the device still trains

    def reported(self, steps: int, done: Callable[[float], float] = float) -> Iterator[int]:
        """The numbers of an epoch's steps. done: from the share of them that is done to what is told."""
        told = time.monotonic()
        for number in range(steps):
            yield number
            self.after_step()
            if (now := time.monotonic()) - told > REPORT_SECONDS:
                self.report(done((number + 1) / steps))
                told = now

    def end_round(self, steps: int) -> None:
        super().end_round(steps * self.spec.steps_per_epoch)
