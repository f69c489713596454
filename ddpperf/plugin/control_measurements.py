"""Control measurements, which check that a comparison of step times can be trusted.

The negative control is a copy of memory, whose time no code change affects. The positive control is
a training step with an artificial delay, which the comparison must find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from ddpperf.errors import first_line
from ddpperf.results.samples import Measured
from ddpperf.specs import CopySpec, EpochSpec, RunSpec, Spec, TrainingSpec
from ddpperf.specs.base import MOST_DELAY_SECONDS
from ddpperf.verdict.stored_run_comparison import Change, Comparison
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool

COPY_BYTES = {"cpu": 2**20, "cuda": 2**28}  # the CPU's size fits into a core's own cache
SLOW_DOWN = {"cpu": 0.25, "cuda": 0.05}  # the delay as a fraction of the step time
CANNOT_MEASURE = (SetFailure, ValueError, OSError)


def copy_spec(device: str) -> CopySpec:
    """Return the measurement spec of a copy of memory, which is the negative control."""
    return CopySpec(world_size=1, nbytes=COPY_BYTES[device])


def shortest(seconds: Mapping[str, float], measured: Mapping[str, Measured]) -> str | None:
    """Return the id of the test with the shortest training step, or None if there is no test.

    Without a training step, the shortest of the other tests is returned. A whole training run is
    never returned, because it would add the delay to very many steps.
    """
    tests = [test for test in seconds if not isinstance(measured[test].spec, RunSpec)]
    trained = [test for test in tests if isinstance(measured[test].spec, TrainingSpec)]
    return min(trained or tests, key=seconds.__getitem__, default=None)


def slowed(spec: Spec, seconds: float) -> Spec:
    """Return a copy of a measurement spec with an artificial delay.

    seconds: the total delay of a step, or of an epoch if the spec describes an epoch.
    """
    steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
    return replace(spec, delay_seconds=min(MOST_DELAY_SECONDS, spec.delay_seconds + seconds / steps))


def copied(pool: Pool, device: str) -> Measured | None:
    """Time a copy of memory, which is the negative control of a comparison with a stored run.

    Returns None if that fails, because only a comparison needs this control measurement.
    """
    with contextlib.suppress(*CANNOT_MEASURE):
        return pool.measure(copy_spec(device))
    return None


def positive_control(comparison: Comparison, measured: Mapping[str, Measured], pool: Pool) -> Change | str:
    """Time the shortest training step again, without and with a delay of the test's tolerance.

    The delay must be seen in the time of the delayed step, beside the step without a delay. Returns a
    sentence if the control could not be measured.
    """
    changes = comparison.changes
    timed = {
        test: change.now_seconds
        for test, change in changes.items()
        if change.quantity == "step" and change.judged
    }
    if (test := shortest(timed, measured)) is None:
        return "the positive control was not measured: no step was compared by its time" if changes else ""
    spec, tolerance = measured[test].spec, min(changes[test].tolerance, SLOW_DOWN["cpu"])
    try:
        usual = median(pool.measure(spec).all_step_seconds())
        delayed = median(pool.measure(slowed(spec, tolerance * usual)).all_step_seconds())
    except CANNOT_MEASURE as error:
        return f"the positive control could not be measured: {first_line(error)}"
    return Change(then_seconds=usual, now_seconds=delayed, limit=1 + tolerance / 2)
