"""What controls a decision: a copy of memory, which no change can touch, and a step that is slowed down on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from ddpperf.results.samples import Measured
from ddpperf.specs import CopySpec, EpochSpec, RunSpec, Spec, TrainingSpec
from ddpperf.specs.base import MOST_DELAY_SECONDS
from ddpperf.verdict.change import Change, Controls
from ddpperf.verdict.stored_run import Comparison
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool

COPY_BYTES = {"cpu": 2**20, "cuda": 2**28}  # on a CPU as much as its own cache holds
SLOW_DOWN = {"cpu": 0.25, "cuda": 0.05}  # of a step


def copy_spec(device: str) -> CopySpec:
    """The negative control of a decision on this device."""
    return CopySpec(world_size=1, nbytes=COPY_BYTES[device])


def shortest(seconds: Mapping[str, float], measured: Mapping[str, Measured]) -> str | None:
    """The test to be slowed down: of the shortest training, or where none was measured, of anything; None without a test. Not a
    whole run, whose delay would come with each of very many steps."""
    seconds = {test: each for test, each in seconds.items() if not isinstance(measured[test].spec, RunSpec)}
    trained = [test for test in seconds if isinstance(measured[test].spec, TrainingSpec)]
    return min(trained or seconds, key=lambda test: seconds[test], default=None)


def slowed(spec: Spec, seconds: float) -> Spec:
    """The same, longer by these seconds, of an epoch by those of its steps together."""
    steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
    return replace(spec, delay_seconds=min(MOST_DELAY_SECONDS, spec.delay_seconds + seconds / steps))


class StoredControls:
    """The controls of a run that is compared with a stored one, or may be: measured by the sets of its tests, after these.

    copied: None until it was measured, or if it could not be.
    """

    def __init__(self, device: str) -> None:
        self.copied: Measured | None = None
        self._device = device
        self._positive = Controls()

    def copy(self, pool: Pool) -> None:
        """Measure the copy; that it could not be is a hole in the comparison, not this run's failure."""
        with contextlib.suppress(SetFailure, ValueError, OSError):
            self.copied = pool.measure(copy_spec(self._device))

    def slow_down(self, comparison: Comparison, measured: Mapping[str, Measured], pool: Pool) -> None:
        """Measure the shortest of the training steps that were compared by their times, slowed down to beyond its limit."""
        timed = {
            test: each.now_seconds for test, each in comparison.changes.items() if each.quantity == "step"
        }
        if (test := shortest(timed, measured)) is None:
            if comparison.changes:  # of which no control shows that what is slower would be seen
                self._positive = Controls(
                    missing=["the positive control was not measured: no step was compared by its time"]
                )
            return
        change, spec = comparison.changes[test], measured[test].spec
        excess = change.limit * (1 + SLOW_DOWN[self._device]) - 1
        try:
            seconds = median(pool.measure(slowed(spec, excess * change.now_seconds)).all_step_seconds())
            self._positive = Controls(
                positive=Change(then_seconds=change.now_seconds, now_seconds=seconds, limit=change.limit)
            )
        except (SetFailure, ValueError, OSError) as error:
            self._positive = Controls(
                missing=[f"the positive control could not be measured: {str(error).splitlines()[0]}"]
            )

    def beside(self, negative: Controls) -> Controls:
        """All of them."""
        return replace(
            self._positive, negative=negative.negative, missing=[*negative.missing, *self._positive.missing]
        )
