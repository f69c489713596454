"""The serial fraction of Amdahl's and Gustafson's laws, fitted to measured speedups.

Rearranged, both laws are linear in the serial fraction s, so that a fit is a regression through the
origin. Its interval is Student's t, over the world sizes of one process set or over the fractions
of several process sets. The speedups of one process set share one t(1) and are not independent. A
negative fraction means that the speedup exceeds N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean

from ddpperf.analysis.statistics import mean_interval

CONFIDENCE = 0.95


def amdahl_speedup(serial_fraction: float, N: int) -> float:
    """Return the speedup on N devices by Amdahl's law (1967), 1 / (s + (1 - s) / N).

    s is the fraction of t(1) that N devices do not divide.
    """
    return 1 / (serial_fraction + (1 - serial_fraction) / N)


def gustafson_speedup(serial_fraction: float, N: int) -> float:
    """Return the speedup on N devices by Gustafson's law (1988), N - s (N - 1).

    s is the fraction of t(N) in which N devices do the work of one.
    """
    return N - serial_fraction * (N - 1)


@dataclass(frozen=True, kw_only=True)
class SerialFraction:
    """A serial fraction with its 95% interval, which is infinite for a single measurement."""

    fraction: float
    low: float
    high: float


def fit_amdahl(world_sizes: Sequence[int], speedups: Sequence[float]) -> SerialFraction:
    """Fit the serial fraction of Amdahl's law to speedups, 1 - S/N = s S (1 - 1/N).

    The residuals are relative errors of the speedups. Raises ValueError for speedups that are not
    positive, or without any speedup beyond one device.
    """
    return _fit(world_sizes, speedups, lambda N, S: S * (1 - 1 / N))


def fit_gustafson(world_sizes: Sequence[int], speedups: Sequence[float]) -> SerialFraction:
    """Fit the serial fraction of Gustafson's law to speedups, 1 - S/N = s (1 - 1/N).

    The residuals are errors of efficiencies. Raises ValueError as `fit_amdahl` does.
    """
    return _fit(world_sizes, speedups, lambda N, S: 1 - 1 / N)


def over_sets(fractions: Sequence[float]) -> SerialFraction:
    """Return the mean serial fraction of two or more process sets, which are independent."""
    low, high = mean_interval(fractions, CONFIDENCE)
    return SerialFraction(fraction=mean(fractions), low=low, high=high)


def _fit(
    world_sizes: Sequence[int], speedups: Sequence[float], weight: Callable[[int, float], float]
) -> SerialFraction:
    """Fit s in 1 - S/N = s * weight by least squares to the speedups S on N > 1 devices."""
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
