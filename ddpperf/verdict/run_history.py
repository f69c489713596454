"""How far runs of the same code differ, learned from a test's stored runs, and what follows: two bounds, and the slow drift.

All values are natural logs of seconds of a step, a run's median each, so a difference of 0.01 is 1 %; greater is worse. The
unit is the run: its rounds and process sets share a machine and a day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import fsum, log, sqrt
from statistics import mean, median, variance

from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import FIRST_RUNS, PastRun

PRIOR_FREEDOM = 10  # how many degrees of freedom the usual spread counts beside a test's own
SCREEN_ALPHA = 0.01  # one-sided, for each test
DRIFT_RUNS = FIRST_RUNS  # as many at the beginning as at the end
DRIFT_MARGIN = 0.01


@dataclass(frozen=True, kw_only=True)
class Spread:
    """deviation: standard, between runs. freedom: its degrees of freedom."""

    deviation: float
    freedom: float


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Differences from one run to another above which the later is a suspect, or slower."""

    suspect: float
    slower: float


def step_log(measured: Measured) -> float:
    """The log of a run's median seconds of a step."""
    return log(median(measured.all_step_seconds()))


def series(history: Sequence[PastRun], test: str, like: Measured) -> list[float]:
    """The logs of the runs that measured the test by the same spec, in the order of `history`."""
    return [step_log(run.measured[test]) for run in _of(history, test, like)]


def _of(history: Sequence[PastRun], test: str, like: Measured) -> list[PastRun]:
    return [run for run in history if test in run.measured and run.measured[test].spec == like.spec]


def spread(logs: Sequence[float], usual: float) -> Spread:
    """tau^2 = (10 usual^2 + f s^2) / (10 + f), with 10 + f degrees of freedom: Smyth's moderated variance (2004).

    logs[run], oldest first. usual: the standard deviation of such tests. s^2 is half the mean square of successive
    differences (von Neumann, 1941), which for k runs has f = 2 (k-1)^2 / (3k-4) degrees of freedom, by its own variance.

    Not the variance about the mean, with f = k - 1: that takes each accepted change of the code for noise. Simulated with runs
    that differ by 0.5 %, a usual 1 %, and a gain of 10 % that the last 5 of 10 runs have: when it is lost again, that one makes
    0 % of tests suspects, this one 100 %. Where runs differ by 2 %, this one fails 4 % of unchanged suites, that one 1.4 %.
    """
    runs = len(logs)
    if runs < 2:
        return Spread(deviation=usual, freedom=PRIOR_FREEDOM)
    own = fsum((after - before) ** 2 for before, after in pairwise(logs)) / (2 * (runs - 1))
    return _moderated(own, 2 * (runs - 1) ** 2 / (3 * runs - 4), usual)


def _moderated(own: float, freedom: float, usual: float) -> Spread:
    together = (PRIOR_FREEDOM * usual**2 + freedom * own) / (PRIOR_FREEDOM + freedom)
    return Spread(deviation=sqrt(together), freedom=PRIOR_FREEDOM + freedom)


def bounds(spread: Spread, *, margin: float, suite_alpha: float, compared: int) -> Bounds:
    """Bounds of a difference between two runs: margin + t tau sqrt(2), since each of the two has an error of tau.

    Where nothing changed by more than the margin, a test is a suspect with probability `SCREEN_ALPHA`, and any of `compared`
    tests is slower with at most `suite_alpha` (by the union bound): if runs differ as is usual. If they differ by twice that,
    12 % of suites of 60 tests fail by chance without a history, 5 % with 5 runs, 3 % with 20.
    """
    alphas = SCREEN_ALPHA, min(SCREEN_ALPHA, suite_alpha / compared)
    suspect, slower = (
        margin + _critical(alpha, spread.freedom) * spread.deviation * sqrt(2) for alpha in alphas
    )
    return Bounds(suspect=suspect, slower=slower)


def first_and_last(
    history: Sequence[PastRun], test: str, now: Measured
) -> tuple[list[float], list[float]] | None:
    """The logs of the first five promoted runs of the test's spec, and of the last five runs, this one among them.

    None where fewer than five were promoted, or fewer than five followed those.
    """
    runs = _of(history, test, now)
    promoted = [number for number, run in enumerate(runs) if run.promoted][:DRIFT_RUNS]
    if len(promoted) < DRIFT_RUNS or len(runs) - promoted[-1] < DRIFT_RUNS:
        return None
    logs = [step_log(run.measured[test]) for run in runs]
    return [logs[number] for number in promoted], [*logs, step_log(now)][-DRIFT_RUNS:]


def drift(first: Sequence[float], last: Sequence[float], usual: float, alpha: float) -> float:
    """How much slower the last runs are than the first, by their means; 0 unless that is beyond `DRIFT_MARGIN` and chance.

    The error is tau sqrt(1/5 + 1/5) for five each, tau by the variance inside of the two fives: what drifts is no noise.
    alpha: one-sided. What each of many nights makes slower by 0.1 % is not seen from one to the next.
    """
    within = _moderated((variance(first) + variance(last)) / 2, len(first) + len(last) - 2, usual)
    error = within.deviation * sqrt(1 / len(first) + 1 / len(last))
    change = mean(last) - mean(first)
    return change if change - _critical(alpha, within.freedom) * error > DRIFT_MARGIN else 0.0


@cache
def _critical(alpha: float, freedom: float) -> float:
    from scipy.stats import t  # here: it takes most of a second, and few commands need it

    return float(t.isf(alpha, freedom))
