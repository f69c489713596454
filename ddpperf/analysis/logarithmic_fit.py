"""Least-squares fits of measured times that are sums of parts, with logarithmic residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
NEGLIGIBLE = 1e-6  # a part below this fraction of every measured time counts as 0
DIGITS = 3  # prediction errors that agree to this many digits count as equal
Array = npt.NDArray[np.float64]


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


@dataclass(frozen=True, kw_only=True)
class LogFit:
    """The result of fitting measured times as sums of parts.

    `values[part]` is the seconds of one unit of each part. `residuals[call]` is the log of
    predicted over measured seconds. `jacobian[call, part]` holds the derivatives of the residuals.
    """

    values: Array
    residuals: Array
    jacobian: Array

    def estimates(self, residuals: Array, parameters: int) -> list[Estimate]:
        """Return the fitted values with 95% intervals by Student's t.

        The standard deviation is that of `residuals`, of this fit or of several fits with
        `parameters` values together. The intervals are infinite if no degrees of freedom are left.
        """
        from scipy.stats import t  # imported here because it takes 0.5 s

        freedom = len(residuals) - parameters
        deviation = math.sqrt(float(residuals @ residuals) / freedom) if freedom > 0 else math.inf
        units = np.abs(self.jacobian).max(axis=0)  # bytes and messages differ by many orders of magnitude
        scaled = self.jacobian / units
        errors = np.sqrt(np.diag(np.linalg.pinv(scaled.T @ scaled))) / units
        half = t.ppf((1 + CONFIDENCE) / 2, max(freedom, 1)) * deviation * errors
        return [
            Estimate(value=float(value), low=max(0.0, float(value - width)), high=float(value + width))
            for value, width in zip(self.values, half, strict=True)
        ]


class Undetermined(ValueError):
    """Raised if the measured times do not determine all parameters of a cost model."""


def fit_determined(counts: Array, seconds: Sequence[float], unclear: str) -> list[Estimate]:
    """Fit measured times as sums of parts, and return the seconds of one unit of each part.

    Each column of `counts` is a part, such as messages or bytes. Raises Undetermined with the
    sentence `unclear` if the times cannot tell the parts apart.
    """
    scaled = counts / np.array(seconds)[:, None]
    if np.linalg.matrix_rank(scaled / np.abs(scaled).max(axis=0)) < counts.shape[1]:
        raise Undetermined(unclear)
    fit = fit_logarithms(counts.tolist(), seconds)
    return fit.estimates(fit.residuals, len(fit.values))


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


def fit_logarithms(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> LogFit:
    """Fit times as sums of parts: seconds[call] = counts[call] @ values, with values >= 0.

    The residuals are logarithms because relative errors would favour low values: half the time is
    off by 0.5, twice the time by 1.
    """
    from scipy.optimize import least_squares, nnls

    counted, measured = np.array(counts, dtype=float), np.array(seconds, dtype=float)
    units = np.abs(counted).max(axis=0)
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
    residuals = np.log(predicted / measured)
    return LogFit(values=values / units, residuals=residuals, jacobian=counted / predicted[:, None])
