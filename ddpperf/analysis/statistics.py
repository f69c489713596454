"""Statistics of measured durations: spread, drift, and confidence intervals of means."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from statistics import mean, median, quantiles, stdev, variance

import numpy as np

CONFIDENCE = 0.95
USUAL_DEGREES_OF_FREEDOM = 8  # of a usual spread, in place of a measured one
FEWEST_ROUNDS = 4  # fewer rounds have no meaningful spread
DRIFT_P = 0.001  # two-sided; at most one run in 17 of 60 steady tests reports a drift
LEAST_DRIFT = 0.02  # it moves the median by 1%, which is how much undisturbed runs differ

BETWEEN_MODES, SMALLEST_MODE, MODES_APART, FEWEST_FOR_MODES = 0.85, 0.02, 1.1, 50


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimated value with its 95% interval."""

    value: float
    low: float
    high: float

    def inverse(self, numerator: float = 1.0) -> Estimate:
        """Divide `numerator` by an estimate and by its interval's bounds; 0 gives infinity."""
        low, value, high = (
            numerator / bound if bound else math.inf for bound in (self.high, self.value, self.low)
        )
        return Estimate(value=value, low=low, high=high)


def relative_iqr(values: Sequence[float]) -> float:
    """Return the interquartile range as a fraction of the median, for at least two values."""
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return (upper - lower) / median(values)


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and its standard error, which is 0 for a single value.

    For many normal values the error is sqrt(pi / 2) s / sqrt(n). s is estimated as the
    interquartile range over 1.349.
    """
    if len(values) == 1:
        return values[0], 0.0
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return middle, math.sqrt(math.pi / 2) * (upper - lower) / 1.349 / math.sqrt(len(values))


@cache
def t_quantile(alpha: float, degrees_of_freedom: float) -> float:
    """Return the value that Student's t exceeds with probability `alpha`."""
    from scipy.special import stdtrit  # imported here because it takes 0.2 s

    return float(-stdtrit(degrees_of_freedom, alpha))


def fastest(seconds: Mapping[str, Sequence[float]], usual: float) -> list[str]:
    """Return the names that may be the fastest, the shortest mean time first.

    `seconds[name]` has one value per process set, equally many for each of two or more names. The
    truly fastest name is returned with a probability of 95% (subset selection, Gupta 1965). Of K
    names with R values each, a name is left out if its mean log seconds exceed the smallest mean by
    more than t(0.05 / (K-1)) s sqrt(2/R). s is the standard deviation of log seconds between process
    sets, pooled over the names, with K (R-1) degrees of freedom. For R = 1, s is `usual`.
    """
    logs = {name: [math.log(value) for value in values] for name, values in seconds.items()}
    means = {name: mean(values) for name, values in logs.items()}
    K, R = len(logs), min(map(len, logs.values()))
    s = math.sqrt(mean(map(variance, logs.values()))) if R > 1 else usual
    quantile = t_quantile((1 - CONFIDENCE) / (K - 1), K * (R - 1) or USUAL_DEGREES_OF_FREEDOM)
    limit = min(means.values()) + quantile * s * math.sqrt(2 / R)
    return sorted((name for name in means if means[name] <= limit), key=means.__getitem__)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of two or more values, by Student's t."""
    half = t_quantile((1 - CONFIDENCE) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def welch_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return Welch's 95% interval (1947) for the difference of two means.

    It is a point if neither group has any variance.
    """
    from scipy.stats import ttest_ind

    if stdev(ours) == stdev(theirs) == 0:
        difference = mean(ours) - mean(theirs)
        return difference, difference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # if one of the two has no variance
        interval = ttest_ind(ours, theirs, equal_var=False).confidence_interval(CONFIDENCE)
    return float(interval.low), float(interval.high)


def two_modes(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the medians of both modes of positive values, and the fraction of values in the larger mode.

    Returns None if there is one mode. Otsu's threshold (1979) divides the sorted logarithms so that the
    variance between both groups is largest. There are two modes if it is at least `BETWEEN_MODES` of the
    whole variance (0.64 for one normal distribution, 0.75 for a uniform one), if each mode has at least
    `SMALLEST_MODE` of the values, and if their medians differ by at least `MODES_APART`.
    """
    logs = np.sort(np.log(np.asarray(values, dtype=float)))
    count, least = len(logs), math.ceil(SMALLEST_MODE * len(logs))
    if count < FEWEST_FOR_MODES or (whole := float(logs.var())) == 0:
        return None
    sizes = np.arange(1, count)
    lower = np.cumsum(logs)[:-1] / sizes
    upper = (logs.sum() - np.cumsum(logs)[:-1]) / (count - sizes)
    between = sizes * (count - sizes) / count**2 * (upper - lower) ** 2
    allowed = slice(least - 1, count - least)
    at = least + int(np.argmax(between[allowed]))  # the number of values in the lower mode
    fast, slow = math.exp(np.median(logs[:at])), math.exp(np.median(logs[at:]))
    if between[at - 1] < BETWEEN_MODES * whole or slow / fast < MODES_APART:
        return None
    return fast, slow, (count - at) / count


def drift(seconds: Sequence[float]) -> float | None:
    """Return the drift of durations from the first to the last round, divided by their median.

    A positive change means that rounds got slower. Returns None for no drift. A drift needs p <
    `DRIFT_P` for Kendall's tau of rounds and seconds, and a change of at least `LEAST_DRIFT`. The
    change is the Theil-Sen slope times the number of rounds minus one. Both methods assume only
    that the noise is independent from round to round. Fewer than 7 rounds never drift. 7 rounds
    drift only if they are all in order, 10 rounds only if at most 5 pairs are not.
    """
    pairs = list(combinations(enumerate(seconds), 2))
    slopes = [(after - before) / (late - early) for (early, before), (late, after) in pairs]
    out_of_order = min(sum(slope <= 0 for slope in slopes), sum(slope >= 0 for slope in slopes))
    if out_of_order > _most_out_of_order(len(seconds)):
        return None
    change = median(slopes) * (len(seconds) - 1) / median(seconds)
    return change if abs(change) >= LEAST_DRIFT else None


@cache
def _most_out_of_order(rounds: int) -> int:
    """Return how many pairs of rounds may be out of order for p < `DRIFT_P`; below 0 if none may be.

    p is the two-sided one of Kendall's tau. Its exact distribution is that of a sum: with each
    further round, any number of the earlier ones may be out of order with it (Kendall 1938).
    scipy.stats has it, too, but takes a second to be imported.
    """
    chances = np.ones(1)
    for earlier in range(1, rounds):
        chances = np.convolve(chances, np.full(earlier + 1, 1 / (earlier + 1)))
    return int(np.searchsorted(2 * np.cumsum(chances), DRIFT_P)) - 1


def spread_over_ranks(seconds: Sequence[Sequence[float]]) -> float | None:
    """Return the slowest rank's step time minus the fastest's, divided by the median.

    The input is seconds[round][rank], with at least one round. A rank's time is its median over
    rounds, so that one stalled round does not make a rank slow. Returns None for one rank.
    """
    ranks = [median(rounds) for rounds in zip(*seconds, strict=True)]
    return (max(ranks) - min(ranks)) / median(ranks) if len(ranks) > 1 else None
