"""Slow drifts of step times over many runs, which a comparison of one run with another cannot see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, variance

from ddpperf.analysis.statistics import t_quantile

DRIFT_RUNS = 5  # the number of runs compared at the beginning, and at the end
DRIFT_MARGIN = 0.01  # a smaller log ratio is no drift
PRIOR_DEGREES_OF_FREEDOM = 10  # the weight of the usual spread, against a test's own spread


def drifts(
    history: Sequence[tuple[bool, Mapping[str, float]]],
    now: Mapping[str, float],
    usual: Mapping[str, float],
    alpha: float,
) -> dict[str, float]:
    """Return the log ratio of each test's last five runs to its first five baselines.

    The log ratio is 0 if it is no significant slow-down, by a one-sided t test for which the
    probability that any test of a steady suite drifts is at most `alpha`. Tests with fewer than
    five baselines, or with fewer than five runs after the fifth baseline, are left out.

    history: for each earlier run, oldest first, whether it was promoted to a baseline, and the
    natural log of the step seconds of each test that measured the same work as in this run.
    now: the log step seconds of this run, by test. usual: the usual standard deviation of a test's
    log step seconds between runs.
    """
    found = {}
    for test, last in now.items():
        runs = [(promoted, logs[test]) for promoted, logs in history if test in logs]
        if ends := _first_and_last([*runs, (False, last)]):
            found[test] = _slow_down(*ends, usual[test], alpha / len(now))
    return found


def _first_and_last(runs: Sequence[tuple[bool, float]]) -> tuple[list[float], list[float]] | None:
    """Return the log step seconds of a test's first five baselines and last five runs, if there are."""
    baselines = [number for number, (promoted, _) in enumerate(runs) if promoted][:DRIFT_RUNS]
    if len(baselines) < DRIFT_RUNS or len(runs) - 1 - baselines[-1] < DRIFT_RUNS:
        return None
    return [runs[number][1] for number in baselines], [log for _, log in runs[-DRIFT_RUNS:]]


def _slow_down(first: Sequence[float], last: Sequence[float], usual: float, alpha: float) -> float:
    """Return the log ratio by which the last runs are slower than the first; 0 if not significant.

    A significant log ratio exceeds `DRIFT_MARGIN` by more than t(alpha) tau sqrt(1/5 + 1/5). tau^2 is
    the variance within the two groups, shrunk towards usual^2 (Smyth 2004). This finds a slow-down of
    0.1% per night.
    """
    freedom = PRIOR_DEGREES_OF_FREEDOM + 2 * (DRIFT_RUNS - 1)
    own = (DRIFT_RUNS - 1) * (variance(first) + variance(last))
    tau = sqrt((PRIOR_DEGREES_OF_FREEDOM * usual**2 + own) / freedom)
    change = mean(last) - mean(first)
    significant = change - t_quantile(alpha, freedom) * tau * sqrt(2 / DRIFT_RUNS) > DRIFT_MARGIN
    return change if significant else 0.0
