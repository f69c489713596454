"""Slow drifts of step times over many runs, which a comparison of one run with another cannot see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt
from statistics import mean

from ddpperf.analysis.statistics import t_quantile
from ddpperf.history.past_runs import FIRST_RUNS, PastRun, Work

LEAST_RUNS = 3  # with this one
DRIFT_MARGIN = 0.01  # a smaller log ratio is no drift
PRIOR_DEGREES_OF_FREEDOM = 10  # the weight of the usual spread, against a test's own spread


def drifts(
    history: Sequence[PastRun], now: Mapping[Work, float], usual: Mapping[Work, float], alpha: float
) -> dict[str, float]:
    """Return the log ratio of each test's last runs to its first baselines, at most five of each.

    The log ratio is 0 if it is no significant slow-down, by a one-sided t test for which the
    probability that any test of a steady suite drifts is at most `alpha`. Tests with fewer than three
    runs are left out, and those without a baseline before this run.

    history: the earlier runs, oldest first, of which those count that were accepted. now: the log step
    seconds of this run. usual: the usual standard deviation of log step seconds between runs.
    """
    found = {}
    for work, last in now.items():
        runs = [run for run in history if run.accepted and work in run.seconds]
        values = [(run.promoted, log(run.seconds[work])) for run in runs]
        if ends := first_and_last([*values, (False, last)]):
            found[work[0]] = _slow_down(*ends, usual[work], alpha / len(now))
    return found


def first_and_last(runs: Sequence[tuple[bool, float]]) -> tuple[list[float], list[float]] | None:
    """Return the values of the first baselines and of the last runs, if there are enough runs.

    runs: for each run, oldest first, whether it is a baseline, and its value. At most half of the runs
    are first ones.
    """
    most = min(FIRST_RUNS, len(runs) // 2)
    baselines = [number for number, (promoted, _) in enumerate(runs) if promoted][:most]
    if len(runs) < LEAST_RUNS or not baselines:
        return None
    later = runs[baselines[-1] + 1 :]
    return [runs[number][1] for number in baselines], [value for _, value in later[-FIRST_RUNS:]]


def _slow_down(first: Sequence[float], last: Sequence[float], usual: float, alpha: float) -> float:
    """Return the log ratio by which the last runs are slower than the first; 0 if not significant.

    A significant log ratio exceeds `DRIFT_MARGIN` by more than t(alpha) tau sqrt(1/n + 1/m). tau^2 is
    the variance within the two groups of n and m runs, shrunk towards usual^2 (Smyth 2004). With five
    runs each, this finds a slow-down of 0.1% per night.
    """
    freedom = PRIOR_DEGREES_OF_FREEDOM + len(first) + len(last) - 2
    own = sum((value - mean(group)) ** 2 for group in (first, last) for value in group)
    tau = sqrt((PRIOR_DEGREES_OF_FREEDOM * usual**2 + own) / freedom)
    change = mean(last) - mean(first)
    error = tau * sqrt(1 / len(first) + 1 / len(last))
    return change if change - t_quantile(alpha, freedom) * error > DRIFT_MARGIN else 0.0
