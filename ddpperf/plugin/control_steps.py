"""Control measurements, which check that a comparison of step times can be trusted.

The negative control is a copy of memory, whose time no code change affects. The positive control is
a training step with an artificial delay, which the comparison must find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean, median

from ddpperf.errors import first_line
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.specs import CopySpec, EpochSpec, RunSpec, Spec, TrainingSpec
from ddpperf.specs.spec import MOST_DELAY_SECONDS
from ddpperf.verdict.estimates import Control, MetricEstimates
from ddpperf.verdict.stored_run_comparison import Change, Comparison
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool

COPY = {  # the CPU's size fits into a core's own cache
    "cpu": CopySpec(world_size=1, nbytes=2**20),
    "cuda": CopySpec(world_size=1, nbytes=2**28),
}
SLOW_DOWN = {"cpu": 0.25, "cuda": 0.05}  # the delay as a fraction of the step time
CANNOT_MEASURE = (SetFailure, ValueError, OSError)


def _shortest(seconds: Mapping[str, float], measured: Mapping[str, Measured]) -> str | None:
    """Return the id of the test with the shortest training step, or None if there is no test.

    Without a training step, the shortest of the other tests is returned. A whole training run is
    never returned, because it would add the delay to very many steps.
    """
    tests = [test for test in seconds if not isinstance(measured[test].spec, RunSpec)]
    trained = [test for test in tests if isinstance(measured[test].spec, TrainingSpec)]
    return min(trained or tests, key=seconds.__getitem__, default=None)


def _slowed(spec: Spec, seconds: float) -> Spec:
    """Return a copy of a measurement spec with an artificial delay.

    seconds: the total delay of a step, or of an epoch if the spec describes an epoch.
    """
    steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
    return replace(spec, delay_seconds=min(MOST_DELAY_SECONDS, spec.delay_seconds + seconds / steps))


# --- of a comparison with a stored run


def copied(pool: Pool, device: str) -> Measured | None:
    """Time a copy of memory, which is the negative control of a comparison with a stored run.

    Returns None if that fails, because only a comparison needs this control measurement.
    """
    with contextlib.suppress(*CANNOT_MEASURE):
        return pool.measure(COPY[device])
    return None


def positive_control(comparison: Comparison, measured: Mapping[str, Measured], pool: Pool) -> Change | str:
    """Time the shortest training step again, without and with a delay of the test's tolerance.

    The delayed step must take longer than the step without a delay. Returns a sentence if the
    control could not be measured.
    """
    changes = comparison.changes
    timed = {
        test: change.now_seconds
        for test, change in changes.items()
        if change.quantity == "step" and change.judged
    }
    if (test := _shortest(timed, measured)) is None:
        return (
            "the positive control was not measured: no step time was compared with the stored run"
            if changes
            else ""
        )
    spec, tolerance = measured[test].spec, min(changes[test].tolerance, SLOW_DOWN["cpu"])
    try:
        usual = median(pool.measure(spec).all_step_seconds())
        delayed = median(pool.measure(_slowed(spec, tolerance * usual)).all_step_seconds())
    except CANNOT_MEASURE as error:
        return f"the positive control could not be measured: {first_line(error)}"
    return Change(then_seconds=usual, now_seconds=delayed, limit=1 + tolerance / 2)


# --- of an A/B run


def ab_controls(
    pool: Pool, tests: Mapping[str, Measured], estimates: Sequence[MetricEstimates], device: str
) -> tuple[list[MetricEstimates], list[str]]:
    """Make the control measurements of an A/B run.

    Returns their estimates, and a sentence for each control that could not be measured.
    tests, estimates: the measurements of the tests, and the estimates of their metrics.
    """
    found: list[MetricEstimates] = []
    failures = []
    for control in (partial(_copy, pool, device), partial(_slow_down, pool, tests, estimates, device)):
        try:
            found += control()
        except CANNOT_MEASURE as error:
            failures.append(f"a control could not be measured: {first_line(error)}")
    return found, failures


def _copy(pool: Pool, device: str) -> list[MetricEstimates]:
    """Time a copy of memory in base and candidate, which should take the same time in both."""
    return [_control("negative", *_by_side(pool.measure(COPY[device])), "copy")]


def _slow_down(
    pool: Pool, tests: Mapping[str, Measured], estimates: Sequence[MetricEstimates], device: str
) -> list[MetricEstimates]:
    """Time the candidate's shortest training step with a delay, which the comparison has to find.

    The base is measured without a delay in the same rounds, so that a change of the machine's speed
    since the step's own measurement cancels out.
    """
    timed = {
        metric.test: metric
        for metric in estimates
        if metric.test in tests and metric.primary and metric.gated and metric.metric == "time"
    }
    test = _shortest({test: mean(metric.base) for test, metric in timed.items()}, tests)
    if test is None:
        return []
    usual = tests[test]
    delay = SLOW_DOWN[device] * mean(_by_side(usual)[1])
    delayed = pool.measure(usual.spec, _slowed(usual.spec_of(CANDIDATE), delay))
    if {sample.set for sample in usual.samples} != {sample.set for sample in delayed.samples}:
        usual = pool.measure(usual.spec, usual.candidate_spec)  # a process set was replaced in between
    (base, candidate), (base_again, candidate_delayed) = _by_side(usual), _by_side(delayed)
    # The ratios are of the same process sets, so what makes sets differ cancels out, too.
    pairs = zip(base, candidate, base_again, candidate_delayed, strict=True)
    scale = mean(base)  # makes the ratios seconds again, for the table
    grown = tuple(scale * (slower / again) / (c / b) for b, c, again, slower in pairs)
    return [_control("positive", (scale,) * len(grown), grown, timed[test].noise_class)]


def _by_side(measured: Measured) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the median seconds of a step in each process set of the base, and of the candidate."""
    base, candidate = (tuple(measured.of(side).median_step_seconds().values()) for side in (BASE, CANDIDATE))
    return base, candidate


def _control(
    control: Control, base: tuple[float, ...], candidate: tuple[float, ...], noise_class: Hashable
) -> MetricEstimates:
    return MetricEstimates(
        test=f"{control} control",
        metric="time",
        base=base,
        candidate=candidate,
        noise_class=noise_class,
        control=control,
    )
