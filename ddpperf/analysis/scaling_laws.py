"""Amdahl's and Gustafson's laws: the share of the work that N devices do not share, fitted to speedups, and what follows.

Both are linear in that share s once they are rearranged, so that it is a regression through the origin, with an interval by
Student's t: over the measured world sizes of one process set, or over several sets' shares, in each of which all speedups have
one t(1) in common. A share below 0 says that more devices do more than their part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import mean

from ddpperf.analysis.statistics import mean_interval

CONFIDENCE = 0.95


def amdahl_speedup(serial_share: float, N: int) -> float:
    """1 / (s + (1 - s) / N): the global batch is constant, s the share of one device's time that N do not divide (1967)."""
    return 1 / (serial_share + (1 - serial_share) / N)


def gustafson_speedup(serial_share: float, N: int) -> float:
    """N - s (N - 1): the batch a device is constant, s the share of N devices' time in which they do one's work (1988)."""
    return N - serial_share * (N - 1)


@dataclass(frozen=True, kw_only=True)
class SerialShare:
    """low, high: of the 95 % interval; infinite where one measurement leaves nothing to judge it by."""

    share: float
    low: float
    high: float


def fit_amdahl(world_sizes: Sequence[int], speedups: Sequence[float]) -> SerialShare:
    """1 - S/N = s S (1 - 1/N), whose residuals are the speedups' relative errors.

    Raises ValueError for speedups that are not positive, or none beyond one device.
    """
    return _fit(world_sizes, speedups, lambda N, S: S * (1 - 1 / N))


def fit_gustafson(world_sizes: Sequence[int], speedups: Sequence[float]) -> SerialShare:
    """1 - S/N = s (1 - 1/N), whose residuals are the efficiencies' errors. Raises ValueError as `fit_amdahl`."""
    return _fit(world_sizes, speedups, lambda N, S: 1 - 1 / N)


def over_sets(shares: Sequence[float]) -> SerialShare:
    """The mean of two or more process sets' shares, which are independent of each other as one set's speedups are not."""
    low, high = mean_interval(shares, CONFIDENCE)
    return SerialShare(share=mean(shares), low=low, high=high)


def _fit(
    world_sizes: Sequence[int], speedups: Sequence[float], weight: Callable[[int, float], float]
) -> SerialShare:
    """Least squares of 1 - S/N = s * weight over the measurements beyond one device, which say nothing of it."""
    from scipy.stats import t  # here: it takes most of a second, and few commands need it

    measured = list(zip(world_sizes, speedups, strict=True))
    points = [(weight(N, S), 1 - S / N) for N, S in measured if N > 1]
    if not points or not all(S > 0 for S in speedups):
        raise ValueError(f"a serial share needs positive speedups beyond one device, got {measured}")
    squares = sum(x * x for x, _ in points)
    share = sum(x * y for x, y in points) / squares
    freedom = len(points) - 1
    if not freedom:
        return SerialShare(share=share, low=-inf, high=inf)
    error = sqrt(sum((y - share * x) ** 2 for x, y in points) / freedom / squares)
    reach = float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return SerialShare(share=share, low=share - reach, high=share + reach)
