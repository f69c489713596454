"""Find the runs at which the time of a test changed, by exact optimal partitioning.

All values are natural logs of seconds, so that a difference of 0.01 is 1%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from ddpperf.verdict.noise import LEAST_SPREAD

LEAST_RUNS = 3  # of one level
FEWEST_RUNS = 2 * LEAST_RUNS  # with which a change can be found
PENALTY = 12.0  # of a change, in squared standard deviations
SPIKE_RUNS, SPIKE = 5, 4.0  # the window of the filter; standard deviations
MOST_APART = 5  # runs from one to the other of a difference
PRIOR_FREEDOM = 10.0  # the weight of the usual spread, against the test's own
FREEDOM_OF_A_RUN = 0.35  # degrees of freedom, of a spread from medians
MAD = 0.6745  # the median of the absolute value of a standard normal value


@dataclass(frozen=True)
class Change:
    """A change of a test's time: the first run of the new level, the log ratio, and its standard error."""

    place: int
    size: float
    error: float


def spread(logs: Sequence[float]) -> float:
    """Return the standard deviation between runs of the same code, from the differences of near runs.

    The median is not moved by a few changes and spikes. If there are many runs, neighbours are left
    out, because correlated noise makes them more alike than other runs.
    """
    values = np.array(logs, float)
    most = max(1, min(MOST_APART, len(values) // 8))
    apart = range(max(1, most - 2), most + 1)
    steps = [np.median(np.abs(values[lag:] - values[:-lag])) for lag in apart]
    return max(float(np.sqrt(np.mean(np.square(steps)) / 2)) / MAD, LEAST_SPREAD)


def changes(logs: Sequence[float], usual: float, tests: int) -> list[Change]:
    """Return the changes of a test's time. tests: the number of tests in which changes are searched.

    usual: the usual standard deviation between two runs of the same code.
    """
    if len(logs) < FEWEST_RUNS:
        return []
    freedom = FREEDOM_OF_A_RUN * len(logs)
    sigma = sqrt(PRIOR_FREEDOM * usual**2 + freedom * spread(logs) ** 2) / sqrt(PRIOR_FREEDOM + freedom)
    values = without_spikes(logs, sigma)
    ends = [0, *partition(values / sigma, PENALTY + 2 * log(tests)), len(values)]
    found = []
    for first, place, end in zip(ends, ends[1:], ends[2:], strict=False):
        size = float(values[place:end].mean() - values[first:place].mean())
        found.append(Change(place, size, sigma * sqrt(1 / (place - first) + 1 / (end - place))))
    return found


def without_spikes(logs: Sequence[float], sigma: float) -> NDArray[np.float64]:
    """Return the values with the median of a window in place of each spike (Hampel's filter)."""
    values, half = np.array(logs, float), SPIKE_RUNS // 2
    medians = [np.median(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]
    return np.where(np.abs(values - medians) > SPIKE * sigma, medians, values)


def partition(values: NDArray[np.float64], penalty: float) -> list[int]:
    """Return where new levels begin: the partition with the least cost (Jackson et al. 2005).

    The cost is the sum of the squared distances from each level's mean, plus a penalty for each level.
    """
    count = len(values)
    sums, squares = (np.concatenate([[0.0], np.cumsum(power)]) for power in (values, values**2))
    best, begins = np.full(count + 1, np.inf), np.zeros(count + 1, int)
    best[0] = 0.0
    for end in range(LEAST_RUNS, count + 1):
        starts = np.arange(end - LEAST_RUNS + 1)
        within = squares[end] - squares[starts] - (sums[end] - sums[starts]) ** 2 / (end - starts)
        costs = best[starts] + within + penalty
        begins[end] = int(np.argmin(costs))
        best[end] = costs[begins[end]]
    found, end = [], count
    while (end := int(begins[end])) > 0:
        found.append(end)
    return found[::-1]
