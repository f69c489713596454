"""The limits of the screening.

The limits for a test's change follow from the variation of its time between stored runs. All values
are natural logs of a run's median step seconds, so that a difference of 0.01 is 1% and greater is
worse. One run is one observation, because its rounds and process sets share a machine and a day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, log, sqrt
from statistics import median

from ddpperf.analysis.statistics import t_quantile
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import PastRun

PRIOR_DEGREES_OF_FREEDOM = 10  # the weight of the usual spread, against a test's own spread
SCREEN_ALPHA = 0.01  # one-sided, for each test
MISSED = 0.05  # of slow-downs of the size that `noticed` returns


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A standard deviation of log step times between runs, with its degrees of freedom."""

    deviation: float
    degrees_of_freedom: float


def step_log(measured: Measured) -> float:
    """Return the natural log of a run's median step seconds."""
    return log(median(measured.all_step_seconds()))


def series(history: Sequence[PastRun], test: str, like: Measured) -> list[float]:
    """Return a test's log step times in all runs with the same spec, oldest first."""
    return [step_log(run.measured[test]) for run in history if is_comparable(run, test, like)]


def is_comparable(run: PastRun, test: str, like: Measured) -> bool:
    """Return whether a stored run measured a test with the same spec."""
    return test in run.measured and run.measured[test].spec == like.spec


def spread(logs: Sequence[float], usual: float) -> Spread:
    """Return a test's standard deviation between runs, shrunk towards `usual` (Smyth 2004).

    tau^2 = (10 usual^2 + f s^2) / (10 + f), with 10 + f degrees of freedom. `logs[run]` are log
    step times, oldest first. `usual` is the standard deviation of similar tests. s^2 is half the
    mean square of successive differences (von Neumann 1941). For k runs, s^2 has f = 2 (k-1)^2 /
    (3k-4) degrees of freedom.

    The variance about the mean, with f = k - 1, would take each accepted change of the code for
    noise. Both were simulated with runs that differ by 0.5%, a usual spread of 1%, and a gain of
    10% that the last 5 of 10 runs have. When this gain is lost again, s^2 finds 100% of the tests,
    and the variance about the mean finds none. The price is more false alarms. Where runs differ by
    2%, s^2 fails 4% of unchanged suites and the variance about the mean fails 1.4%.
    """
    runs = len(logs)
    if runs < 2:
        return Spread(deviation=usual, degrees_of_freedom=PRIOR_DEGREES_OF_FREEDOM)
    own = fsum((after - before) ** 2 for before, after in pairwise(logs)) / (2 * (runs - 1))
    degrees_of_freedom = 2 * (runs - 1) ** 2 / (3 * runs - 4)
    together = PRIOR_DEGREES_OF_FREEDOM + degrees_of_freedom
    weighted = PRIOR_DEGREES_OF_FREEDOM * usual**2 + degrees_of_freedom * own
    return Spread(deviation=sqrt(weighted / together), degrees_of_freedom=together)


def bounds(spread: Spread, *, margin: float, suite_alpha: float, compared: int) -> tuple[float, float]:
    """Return two limits for the growth of log step time from one run to another, margin + t tau
    sqrt(2).

    Above the first limit a test is suspect: it may be slower and needs a second measurement. Above
    the second limit it counts as slower. If nothing changed by more than the margin, a test exceeds
    the first with probability `SCREEN_ALPHA`. The probability that any of `compared` tests exceeds
    the second is at most `suite_alpha`, by the union bound. This holds if runs differ as much as is
    usual. If runs differ twice as much, the fraction of unchanged suites of 60 tests that fail is
    12% without a history, 5% with 5 runs and 3% with 20 runs.
    """
    error = spread.deviation * sqrt(2)
    suspect, slower = (
        margin + t_quantile(alpha, spread.degrees_of_freedom) * error
        for alpha in (SCREEN_ALPHA, min(SCREEN_ALPHA, suite_alpha / compared))
    )
    return suspect, slower


def noticed(spread: Spread, *, margin: float) -> float:
    """Return the growth of log step time that exceeds the first limit of `bounds` 19 times in 20."""
    suspect, _ = bounds(spread, margin=margin, suite_alpha=SCREEN_ALPHA, compared=1)
    return suspect + t_quantile(MISSED, spread.degrees_of_freedom) * spread.deviation * sqrt(2)
