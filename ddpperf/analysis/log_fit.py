"""Seconds as sums of parts that are off by factors: least squares of logarithms, where no part takes less than nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
MOST_STEPS = 50
CONVERGED = 1e-12  # relative, of the sum of squares
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its interval of CONFIDENCE."""

    value: float
    low: float
    high: float

    def inverse(self, times: float = 1.0) -> Estimate:
        """Of so many times 1 over it; infinite where it may be 0."""
        slow, value, fast = (times / each if each else math.inf for each in (self.high, self.value, self.low))
        return Estimate(value=value, low=slow, high=fast)


@dataclass(frozen=True, kw_only=True)
class LogFit:
    """values: the seconds of one of each part. logarithms: of predicted over measured, by call. slopes: their derivatives, by
    call and value."""

    values: Array
    logarithms: Array
    slopes: Array

    def estimates(self, spread: float, freedom: int) -> list[Estimate]:
        """The values with intervals by Student's t. spread: the standard deviation of the logarithms, of so many degrees of
        freedom; infinite for none."""
        from scipy.stats import t  # here: it takes most of a second, and few commands need it

        units = np.abs(self.slopes).max(axis=0)  # bytes and messages differ by many orders of magnitude
        covariance = np.linalg.pinv((self.slopes / units).T @ (self.slopes / units))
        half = t.ppf((1 + CONFIDENCE) / 2, max(freedom, 1)) * spread * np.sqrt(np.diag(covariance)) / units
        return [
            Estimate(value=float(value), low=max(0.0, float(value - width)), high=float(value + width))
            for value, width in zip(self.values, half, strict=True)
        ]


def fit_logarithms(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> LogFit:
    """Of calls that have so many of each part: rows [calls, parts], and the calls' seconds, above 0.

    Of relative errors the least squares would be too low, for a time of half is off by 0.5 and one of twice by 1. Each step of
    Gauss and Newton is a problem of least squares without negative values, and shortened where it goes too far.
    """
    from scipy.optimize import nnls

    counted, measured = np.array(rows, dtype=float), np.array(seconds, dtype=float)
    units = np.abs(counted).max(axis=0)
    counted = counted / units
    values, _ = nnls(counted / measured[:, None], np.ones(len(measured)))
    least = _squares(counted @ values / measured)
    for _ in range(MOST_STEPS):
        predicted = counted @ values
        aim, _ = nnls(counted / predicted[:, None], 1 + np.log(measured / predicted))
        tried = [values + part * (aim - values) for part in (1, 0.5, 0.25, 0.125)]
        squares = [_squares(counted @ each / measured) for each in tried]
        if not min(squares) < least * (1 - CONVERGED):
            break
        least = min(squares)
        values = tried[squares.index(least)]
    predicted = counted @ values
    slopes = counted * units / predicted[:, None]
    return LogFit(values=values / units, logarithms=np.log(predicted / measured), slopes=slopes)


def spread_of(logarithms: Array, parameters: int) -> tuple[float, int]:
    """The standard deviation of what fits of so many parameters leave, and its degrees of freedom; infinite for none."""
    freedom = len(logarithms) - parameters
    return (math.sqrt(float(logarithms @ logarithms) / freedom) if freedom > 0 else math.inf), freedom


def _squares(ratios: Array) -> float:
    return float(np.square(np.log(ratios)).sum()) if (ratios > 0).all() else math.inf
