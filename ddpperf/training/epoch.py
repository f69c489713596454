"""Measure whole epochs of training."""

from __future__ import annotations

from collections.abc import Callable

from ddpperf.measuring.repeated_work import Measurement
from ddpperf.training.measured_step import MeasuredStep, TrainingMeasurement


class TrainingEpoch(TrainingMeasurement):
    """Measurement in which each step trains a model for one whole epoch.

    steps: runs and observes one training step after the other. The default is `training`, which
    only runs them.
    after_step: called after each training step with the fraction of the epoch that is done.
    """

    def __init__(
        self,
        training: MeasuredStep,
        *,
        steps: Measurement | None = None,
        after_step: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        super().__init__(training)
        self.steps = steps or training
        self.after_step = after_step

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
        steps = self.spec.steps_per_epoch
        for number in range(1, steps + 1):
            self.steps.step()
            self.after_step(number / steps)
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
