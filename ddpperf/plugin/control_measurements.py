"""The controls of a verdict: a copy of memory, and a step that is slowed down on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from ddpperf.errors import first_line
from ddpperf.results.samples import Measured
from ddpperf.specs import CopySpec, EpochSpec, RunSpec, Spec, TrainingSpec
from ddpperf.specs.base import MOST_DELAY_SECONDS
from ddpperf.verdict.stored_run_comparison import Change, Comparison, Controls
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool

COPY_BYTES = {"cpu": 2**20, "cuda": 2**28}  # on the CPU no more than fits into a core's own cache
SLOW_DOWN = {"cpu": 0.25, "cuda": 0.05}  # fractions of a step
CANNOT_MEASURE = (SetFailure, ValueError, OSError)


def copy_spec(device: str) -> CopySpec:
    """Return the spec of the negative control on this device."""
    return CopySpec(world_size=1, nbytes=COPY_BYTES[device])


def shortest(seconds: Mapping[str, float], measured: Mapping[str, Measured]) -> str | None:
    """Return the test with the shortest training step, or the shortest of all without a training.

    A whole training run is never chosen, because its delay would come with each of very many steps.
    Returns None without a test.
    """
    tests = [test for test in seconds if not isinstance(measured[test].spec, RunSpec)]
    trained = [test for test in tests if isinstance(measured[test].spec, TrainingSpec)]
    return min(trained or tests, key=seconds.__getitem__, default=None)


def slowed(spec: Spec, seconds: float) -> Spec:
    """Return the spec with a delay that makes its step, or its epoch, longer by these seconds."""
    steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
    return replace(spec, delay_seconds=min(MOST_DELAY_SECONDS, spec.delay_seconds + seconds / steps))


class StoredControls:
    """The controls of a run of one side, measured by the process sets of its tests after these.

    copied: the copy of memory; None until it was measured, or if it could not be.
    """

    def __init__(self, device: str) -> None:
        self.copied: Measured | None = None
        self._device = device
        self._positive = Controls()

    def copy(self, pool: Pool) -> None:
        """Measure the copy.

        If that fails, the run does not fail, but its comparison lacks a control.
        """
        with contextlib.suppress(*CANNOT_MEASURE):
            self.copied = pool.measure(copy_spec(self._device))

    def slow_down(self, comparison: Comparison, measured: Mapping[str, Measured], pool: Pool) -> None:
        """Measure the shortest training step with a delay that makes it longer than its limit."""
        timed = {
            test: change.now_seconds
            for test, change in comparison.changes.items()
            if change.quantity == "step"
        }
        if (test := shortest(timed, measured)) is None:
            if comparison.changes:
                self._positive = Controls(
                    missing=["the positive control was not measured: no step was compared by its time"]
                )
            return
        change, spec = comparison.changes[test], measured[test].spec
        excess = change.limit * (1 + SLOW_DOWN[self._device]) - 1
        try:
            seconds = median(pool.measure(slowed(spec, excess * change.now_seconds)).all_step_seconds())
        except CANNOT_MEASURE as error:
            self._positive = Controls(
                missing=[f"the positive control could not be measured: {first_line(error)}"]
            )
        else:
            slower = Change(then_seconds=change.now_seconds, now_seconds=seconds, limit=change.limit)
            self._positive = Controls(positive=slower)

    def beside(self, negative: Controls) -> Controls:
        """Return the positive control together with the negative one."""
        missing = [*negative.missing, *self._positive.missing]
        return replace(self._positive, negative=negative.negative, missing=missing)
