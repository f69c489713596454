"""Speedup and efficiency of training on N devices, and the laws of Amdahl and Gustafson.

t(N) is the slowest rank's seconds of a step on N devices. Rearranged, both laws are linear in the
serial fraction s, so that a fit is a regression through the origin. Its interval is Student's t,
over the world sizes, and over the fractions of several process sets. The wider interval counts. The speedups
of one process set share one t(1) and are not independent. A negative fraction means that the
speedup exceeds N, and a fraction above 1 that N devices are slower than one. Both laws are about
fractions from 0 to 1, so nothing is predicted from other fractions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from statistics import mean

from ddpperf.analysis.statistics import CONFIDENCE, Estimate, mean_interval, t_quantile

Law = Callable[[float, float], float]  # from the serial fraction and N to the speedup
Fit = Callable[[Sequence[int], Sequence[float]], Estimate]
PREDICTED_DEVICES = (2, 4, 8, 16, 32)
SHORTEST_FRACTION = 0.01  # a shorter part of a step has no speedup
ROUNDING = 1e-9  # by which a fitted fraction may lie outside of 0 to 1


def weak_speedup(t1: float, tN: float, N: int) -> float:
    """Return the weak-scaling speedup N * t(1) / t(N) for a constant batch per rank.

    The formula is from Gustafson (1988).
    """
    return N * t1 / tN


def strong_speedup(t1: float, tN: float, N: int) -> float:
    """Return the strong-scaling speedup t(1) / t(N) for a constant global batch.

    The formula is from Amdahl (1967).
    """
    return t1 / tN


def efficiency(speedup: float, N: int) -> float:
    """Return the parallel efficiency, speedup / N."""
    return speedup / N


def part_speedups(
    on_one: Mapping[str, float], on_many: Mapping[str, float], N: int, *, weak: bool
) -> dict[str, float]:
    """Return the speedup of each step part over N devices, from its seconds on one device and on N.

    A part that one of the two steps lacks has no speedup. Neither has a part shorter than
    `SHORTEST_FRACTION` of its step, because the ratio would be noise.
    """
    speedup = weak_speedup if weak else strong_speedup
    least_on_one, least_on_many = (SHORTEST_FRACTION * sum(parts.values()) for parts in (on_one, on_many))
    return {
        part: speedup(t1, on_many[part], N)
        for part, t1 in on_one.items()
        if t1 > least_on_one and on_many.get(part, 0.0) > least_on_many
    }


def amdahl_speedup(serial_fraction: float, N: float) -> float:
    """Return the speedup on N devices by Amdahl's law (1967), 1 / (s + (1 - s) / N).

    s is the fraction of t(1) that N devices do not divide.
    """
    return 1 / (serial_fraction + (1 - serial_fraction) / N)


def gustafson_speedup(serial_fraction: float, N: float) -> float:
    """Return the speedup on N devices by Gustafson's law (1988), N - s (N - 1).

    s is the fraction of t(N) in which N devices do the work of one.
    """
    return N - serial_fraction * (N - 1)


def fit_amdahl(world_sizes: Sequence[int], speedups: Sequence[float]) -> Estimate:
    """Fit the serial fraction of Amdahl's law to speedups, 1 - S/N = s S (1 - 1/N).

    The residuals are relative errors of the speedups. The interval of a single speedup beyond one
    device is infinite.
    """
    return _fit(world_sizes, speedups, lambda N, S: S * (1 - 1 / N))


def fit_gustafson(world_sizes: Sequence[int], speedups: Sequence[float]) -> Estimate:
    """Fit the serial fraction of Gustafson's law to speedups, 1 - S/N = s (1 - 1/N).

    The residuals are errors of efficiencies. The interval of a single speedup is infinite, too.
    """
    return _fit(world_sizes, speedups, lambda N, S: 1 - 1 / N)


def fit_sets(fit: Fit, world_sizes: Sequence[int], speedups: Sequence[Sequence[float]]) -> Estimate:
    """Return the serial fraction of one or more process sets, as fitted to speedups[set][world size].

    The interval of several process sets is the wider one of two: that of the fractions' mean, and
    that of the residuals of the mean speedups. The first alone would be too narrow where the law
    does not hold exactly: from the fractions of five runs on 2 GPUs, it missed the speedup on 4.
    """
    residual = fit(world_sizes, [mean(of_size) for of_size in zip(*speedups, strict=True)])
    if len(speedups) == 1:
        return residual
    fractions = [fit(world_sizes, of_set).value for of_set in speedups]
    low, high = mean_interval(fractions)
    if len(world_sizes) > 1:
        low, high = min(low, residual.low), max(high, residual.high)
    return Estimate(value=mean(fractions), low=low, high=high)


def predicted_speedup(law: Law, fraction: Estimate, N: float) -> Estimate:
    """Return the speedup that a law predicts for N devices, with its 95% interval.

    The bounds are the law's speedups at the bounds of the serial fraction's interval, which is cut
    to fractions from 0 to 1. The bounds are infinite if those of the fraction are. The interval says
    how well the fraction is known, not whether the law holds. Raises ValueError for a fraction that
    is not from 0 to 1.
    """
    if reason := not_predictable(fraction.value):
        raise ValueError(f"{reason}, so nothing is predicted; measure other sizes")
    low, value, high = (
        law(min(max(bound, 0.0), 1.0), N) for bound in (fraction.high, fraction.value, fraction.low)
    )
    if not isfinite(fraction.low) or not isfinite(fraction.high):
        return Estimate(value=value, low=-inf, high=inf)
    return Estimate(value=value, low=low, high=high)


def not_predictable(fraction: float) -> str:
    """Return why the laws predict nothing from a serial fraction, or an empty string if they do."""
    if fraction < -ROUNDING:
        return (
            f"a serial fraction of {fraction:.1%} means that speedups exceed the number of devices: "
            "t(1) was slowed down, the times vary, or smaller parts of the work fit into faster memory"
        )
    if fraction > 1 + ROUNDING:
        return (
            f"a serial fraction of {fraction:.1%} means that several devices are slower than one: "
            "communication costs more than the division of the work saves"
        )
    return ""


def _fit(
    world_sizes: Sequence[int], speedups: Sequence[float], weight: Callable[[int, float], float]
) -> Estimate:
    """Fit s in 1 - S/N = s * weight by least squares to the speedups S on N > 1 devices."""
    from scipy.optimize import curve_fit  # imported here because it takes 0.5 s

    points = [(weight(N, S), 1 - S / N) for N, S in zip(world_sizes, speedups, strict=True) if N > 1]
    x, y = zip(*points, strict=True)
    if len(points) == 1:
        return Estimate(value=y[0] / x[0], low=-inf, high=inf)
    (fraction,), ((variance,),) = curve_fit(lambda x, s: s * x, x, y, jac=lambda x, s: x[:, None])
    half = t_quantile((1 - CONFIDENCE) / 2, len(points) - 1) * float(variance) ** 0.5
    return Estimate(value=float(fraction), low=float(fraction) - half, high=float(fraction) + half)
