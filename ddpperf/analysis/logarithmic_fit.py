"""Least-squares fits of measured times that are sums of parts, with logarithmic residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ddpperf.analysis.statistics import CONFIDENCE, Estimate, t_quantile

NEGLIGIBLE = 1e-6  # a part below this fraction of every measured time counts as 0
DIGITS = 3  # prediction errors that agree to this many digits count as equal
Array = npt.NDArray[np.float64]


class Undetermined(ValueError):
    """Raised if the measured times do not determine all parameters of a cost model."""


class LogFit(NamedTuple):
    """The result of fitting measured times as sums of parts.

    `values[part]` is the seconds of one unit of each part. `residuals[call]` is the log of
    predicted over measured seconds. `errors[part]` is the standard error of each value for residuals
    with a standard deviation of 1.
    """

    values: Array
    residuals: Array
    errors: Array

    def estimates(self, residuals: Array, parameters: int) -> list[Estimate]:
        """Return the fitted values with 95% intervals by Student's t.

        The standard deviation is that of `residuals`, of this fit or of several fits with
        `parameters` values together. The intervals are infinite if no degrees of freedom are left.
        """
        freedom = len(residuals) - parameters
        deviation = math.sqrt(float(residuals @ residuals) / freedom) if freedom > 0 else math.inf
        half = t_quantile((1 - CONFIDENCE) / 2, max(freedom, 1)) * deviation * self.errors
        return [
            Estimate(value=float(value), low=max(0.0, float(value - width)), high=float(value + width))
            for value, width in zip(self.values, half, strict=True)
        ]


def fit_logarithms(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> LogFit:
    """Fit times as sums of parts: seconds[call] = counts[call] @ values, with values >= 0.

    The residuals are logarithms because relative errors would favour low values: half the time is
    off by 0.5, twice the time by 1.
    """
    from scipy.optimize import least_squares, nnls

    counted, measured = np.array(counts, dtype=float), np.array(seconds, dtype=float)
    units = np.abs(counted).max(axis=0)  # bytes and messages differ by many orders of magnitude
    scaled = counted / units
    start, _ = nnls(scaled / measured[:, None], np.ones(len(measured)))
    values = least_squares(
        lambda values: np.log(scaled @ values / measured),
        start,
        lambda values: scaled / (scaled @ values)[:, None],
        bounds=(0, np.inf),
        x_scale="jac",
        **dict.fromkeys(("ftol", "xtol", "gtol"), 1e-14),
    ).x
    parts = scaled * values / (scaled @ values)[:, None]
    values[parts.max(axis=0) < NEGLIGIBLE] = 0.0
    predicted = scaled @ values
    jacobian = scaled / predicted[:, None]
    scale = np.abs(jacobian).max(axis=0)
    errors = np.sqrt(np.diag(np.linalg.pinv((jacobian / scale).T @ (jacobian / scale)))) / scale
    return LogFit(values / units, np.log(predicted / measured), errors / units)


Call = TypeVar("Call")


def held_out_error(
    times: Mapping[Call, float],
    fit: Callable[[Mapping[Call, float]], Callable[[Call], float]],
    size: Callable[[Call], int],
) -> float:
    """Return the median of |predicted / measured - 1| over buffer sizes that the fit did not use.

    Each size but the smallest and the largest is omitted from the fit once. `fit` takes measured
    times, and returns the function that predicts the seconds of a call. `size` is that of a call.
    """
    errors = []
    for held_out in sorted(set(map(size, times)))[1:-1]:
        predict = fit({call: seconds for call, seconds in times.items() if size(call) != held_out})
        errors += [abs(predict(call) / times[call] - 1) for call in times if size(call) == held_out]
    return median(errors)
