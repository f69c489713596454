"""Amdahl's and Gustafson's laws: the serial fraction fitted to measured speedups.

Rearranged, both laws are linear in the serial fraction s, so that a fit is a regression through the
origin. Its interval is Student's t, over the world sizes of one process set or over the fractions
of several sets. The speedups of one set share one t(1) and are not independent. A negative fraction
means that more devices do more than their part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean

from ddpperf.analysis.statistics import mean_interval

CONFIDENCE = 0.95


def amdahl_speedup(serial_fraction: float, N: int) -> float:
    """Return 1 / (s + (1 - s) / N); s is the part of t(1) that N devices do not divide (1967)."""
    return 1 / (serial_fraction + (1 - serial_fraction) / N)


def gustafson_speedup(serial_fraction: float, N: int) -> float:
    """Return N - s (N - 1); s is the part of t(N) in which N devices do the work of one (1988)."""
    return N - serial_fraction * (N - 1)


@dataclass(frozen=True, kw_only=True)
class SerialFraction:
    """A serial fraction with its 95% interval, which is infinite for a single measurement."""

    fraction: float
    low: float
    high: float


def fit_amdahl(world_sizes: Sequence[int], speedups: Sequence[float]) -> SerialFraction:
    """Fit 1 - S/N = s S (1 - 1/N), whose residuals are relative errors of the speedups.

    Raises ValueError for speedups that are not positive, or without any beyond one device.
    """
    return _fit(world_sizes, speedups, lambda N, S: S * (1 - 1 / N))


def fit_gustafson(world_sizes: Sequence[int], speedups: Sequence[float]) -> SerialFraction:
    """Fit 1 - S/N = s (1 - 1/N), whose residuals are errors of efficiencies; raises ValueError."""
    return _fit(world_sizes, speedups, lambda N, S: 1 - 1 / N)


def over_sets(fractions: Sequence[float]) -> SerialFraction:
    """Return the mean of two or more process sets' fractions, which are independent."""
    low, high = mean_interval(fractions, CONFIDENCE)
    return SerialFraction(fraction=mean(fractions), low=low, high=high)


def _fit(
    world_sizes: Sequence[int], speedups: Sequence[float], weight: Callable[[int, float], float]
) -> SerialFraction:
    """Fit 1 - S/N = s * weight to the measurements beyond one device by least squares."""
    from scipy.optimize import curve_fit  # imported here because it takes 0.5 s
    from scipy.stats import t

    measured = list(zip(world_sizes, speedups, strict=True))
    points = [(weight(N, S), 1 - S / N) for N, S in measured if N > 1]
    if not points or not all(S > 0 for S in speedups):
        raise ValueError(f"a serial fraction needs positive speedups beyond one device, got {measured}")
    x, y = zip(*points, strict=True)
    if len(points) == 1:
        return SerialFraction(fraction=y[0] / x[0], low=-inf, high=inf)
    (fraction,), ((variance,),) = curve_fit(lambda x, s: s * x, x, y, jac=lambda x, s: x[:, None])
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(points) - 1)) * float(variance) ** 0.5
    return SerialFraction(fraction=float(fraction), low=float(fraction) - half, high=float(fraction) + half)
