"""Train whole epochs, and report the progress of an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ddpperf.measuring.repeated_work import Measurement
from ddpperf.training.measured_step import MeasuredStep, TrainingMeasurement

REPORT_SECONDS = 1.0


class TrainingEpoch(TrainingMeasurement):
    """Measurement in which each step trains a model for one whole epoch.

    steps: runs and observes one training step after the other. The default is `training`, which
    only runs them.
    after_step: called after each training step.
    report: called about once a second with the fraction of the epoch that is done.
    """

    def __init__(
        self,
        training: MeasuredStep,
        *,
        steps: Measurement | None = None,
        after_step: Callable[[], None] = lambda: None,
        report: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        super().__init__(training)
        self.steps = steps or training
        self.after_step = after_step
        self.report = report

    def warm_up(self, steps: int) -> None:
        """Warm up with a whole epoch, or with a few steps if all steps of the epoch do the same work.

        A DataLoader starts its workers at the first step of an epoch.
        """
        spec = self.spec
        is_same = spec.input != "dataloader" and spec.last_batch_size == spec.process_batch_size
        if is_same or spec.captured or self.steps is not self.training:
            self.steps.warm_up(min(steps, spec.steps_per_epoch))
        if is_same:
            self.training.training.input.prepare(self.training.epoch)
        else:
            self.step()

    def step(self) -> None:
        for _ in reported(self.spec.steps_per_epoch, self.report):
            self.steps.step()
            self.after_step()
        # The CPU prepares the next epoch while the device still trains.
        self.training.training.input.prepare(self.training.epoch)

    def start_round(self) -> None:
        self.steps.start_round()

    def begin_timed(self) -> None:
        self.steps.begin_timed()

    def end_round(self, steps: int) -> None:
        self.steps.end_round(steps * self.spec.steps_per_epoch)

    def finish(self) -> dict[str, float]:
        return self.steps.finish()


def reported(steps: int, report: Callable[[float], None]) -> Iterator[int]:
    """Yield the step numbers of an epoch, and report about once a second which fraction is done."""
    last = time.monotonic()
    for number in range(steps):
        yield number
        if (now := time.monotonic()) - last > REPORT_SECONDS:
            report((number + 1) / steps)
            last = now
