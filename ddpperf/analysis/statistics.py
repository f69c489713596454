"""Summaries of durations that a few slow rounds do not move, and what makes them doubtful."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from statistics import mean, median, quantiles, stdev

FEWEST_ROUNDS = 4  # for a spread
DRIFT_P = 0.001  # two-sided: with 60 steady tests, at most one run in 17 reports a drift that is none
LEAST_DRIFT = (
    0.02  # moves the median by 1 %: GPU-bound steps differ that much between runs that nothing disturbed
)


def relative_iqr(values: Sequence[float]) -> float:
    """The interquartile range as a fraction of the median: the spread of the middle half; at least two values."""
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return (upper - lower) / median(values)


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The median and its standard error, which is sqrt(pi / 2) s / sqrt(n) of many normal values, s being the interquartile
    range over 1.349; 0 for one value, which says nothing of it."""
    if len(values) == 1:
        return values[0], 0.0
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return middle, math.sqrt(math.pi / 2) * (upper - lower) / 1.349 / math.sqrt(len(values))


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Of the mean of two values or more, by Student's t."""
    from scipy.stats import t  # here: it takes most of a second, and few commands need it

    half = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def welch_interval(ours: Sequence[float], theirs: Sequence[float], confidence: float) -> tuple[float, float]:
    """Of the first mean less the second, whose values may spread differently (Welch 1947); both NaN if none spreads."""
    from scipy.stats import ttest_ind  # here, too

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where one of the two has no spread
        found = ttest_ind(ours, theirs, equal_var=False).confidence_interval(confidence)
    return float(found.low), float(found.high)


def drift(seconds: Sequence[float]) -> float | None:
    """The change from the first to the last round as a fraction of the median, positive if rounds got slower; None without one.

    seconds[round], all positive. There is a trend if Kendall's tau of rounds and seconds has p < `DRIFT_P`, and it matters from
    `LEAST_DRIFT` up. Its size is Theil's and Sen's slope, the median slope over all pairs of rounds, times the rounds less one.
    Both only need noise that is independent from round to round, whatever its distribution.

    Of 7 rounds all must be in order, of 10 all pairs but 5: fewer than 7 rounds never drift.
    """
    if 2 / math.factorial(min(len(seconds), 20)) >= DRIFT_P:  # the p of rounds that are all in order
        return None
    from scipy.stats import (
        kendalltau,
        theilslopes,
    )  # here: it takes most of a second, and few commands need it

    rounds = range(len(seconds))
    if not kendalltau(rounds, seconds).pvalue < DRIFT_P:  # of a constant it is NaN
        return None
    change = float(theilslopes(seconds, rounds).slope) * (len(seconds) - 1) / median(seconds)
    return change if abs(change) >= LEAST_DRIFT else None


def spread_over_ranks(seconds: Sequence[Sequence[float]]) -> float | None:
    """How far the slowest rank is from the fastest, as a fraction of the median rank; None for one rank.

    seconds[round][rank], at least one round. A rank's time is its median over rounds, so one stalled round makes no rank slow.
    """
    ranks = [median(rounds) for rounds in zip(*seconds, strict=True)]
    return (max(ranks) - min(ranks)) / median(ranks) if len(ranks) > 1 else None
