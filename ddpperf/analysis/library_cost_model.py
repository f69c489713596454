"""A cost model of a library's all-reduce: time over buffer size, with one line per protocol.

The library chooses the fastest protocol, so that the time is the minimum of the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from math import log

import numpy as np

from ddpperf.analysis.logarithmic_fit import DIGITS, LogFit, fit_logarithms, held_out_error
from ddpperf.analysis.statistics import Estimate

MOST_LINES = 3  # the number of protocols of a library
FEWEST_SIZES = 4  # cross-validation leaves out each size but the first and last

Points = Sequence[tuple[int, float]]  # buffer sizes in bytes, with seconds
Lines = Sequence[tuple[float, float]]  # the start of each line in seconds, and its seconds per byte


def seconds_by(lines: Lines, nbytes: float) -> float:
    """Return the modelled seconds to all-reduce a buffer of `nbytes` bytes."""
    return min(start + nbytes * slope for start, slope in lines)


@dataclass(frozen=True, kw_only=True)
class LibraryModel:
    """A cost model of one or more lines, as many as predict the times of left-out buffer sizes best.

    `latency` is the smallest start of a line. `byte_seconds` is the smallest slope. Their intervals
    use the residuals of all lines. `held_out_error` is the median of |predicted / measured - 1|
    over sizes that neither the fit nor the choice used. This needs nested cross-validation, because
    the error that chose a model is too optimistic for new sizes (Varma and Simon 2006).
    """

    lines: Lines
    latency: Estimate
    byte_seconds: Estimate
    held_out_error: float


def choose_lines(sizes: Sequence[int], seconds: Sequence[float]) -> LibraryModel:
    """Fit lines to all-reduce times, as many as predict left-out buffer sizes best.

    Each size but the first and the last is left out once. The lines say nothing about sizes beyond
    the measured ones. There must be `FEWEST_SIZES` sizes or more.
    """
    points = sorted(zip(sizes, seconds, strict=True))
    # Each line needs two sizes, even when the choice and its test each leave out one size.
    most = min(MOST_LINES, (len(points) - 2) // 2)
    fits = _fits(points, _best_number(points, most))
    residuals = np.concatenate([fit.residuals for fit in fits])
    starts, slopes = zip(*(fit.estimates(residuals, 2 * len(fits)) for fit in fits), strict=True)
    return LibraryModel(
        lines=_lines(fits),
        latency=min(starts, key=lambda estimate: estimate.value),
        byte_seconds=min(slopes, key=lambda estimate: estimate.value),
        held_out_error=_held_out_error(points, lambda kept: _best_number(kept, most)),
    )


def _best_number(points: Points, most: int) -> int:
    return min(
        range(1, most + 1),
        key=lambda number: round(_held_out_error(points, lambda kept: number), DIGITS),
    )


def _held_out_error(points: Points, number_of: Callable[[Points], int]) -> float:
    def fit(kept: Mapping[int, float]) -> Callable[[int], float]:
        points = list(kept.items())
        lines = _lines(_fits(points, number_of(points)))
        return lambda nbytes: seconds_by(lines, nbytes)

    return held_out_error(dict(points), fit, size=int)


def _fits(points: Points, number: int) -> list[LogFit]:
    """Fit a number of lines to all-reduce times by least squares of logarithms.

    Each line is fitted to two or more neighbouring sizes of `points`, which are in order.
    """

    def squares(fits: list[LogFit]) -> float:
        lines = _lines(fits)
        return sum(log(seconds_by(lines, size) / seconds) ** 2 for size, seconds in points)

    cuts = combinations(range(2, len(points) - 1), number - 1)
    splits = ([points[a:b] for a, b in pairwise((0, *inner, len(points)))] for inner in cuts)
    fits = ([_line(tuple(part)) for part in parts] for parts in splits if min(map(len, parts)) > 1)
    return min(fits, key=squares)


def _lines(fits: Sequence[LogFit]) -> Lines:
    return [(float(fit.values[0]), float(fit.values[1])) for fit in fits]


@lru_cache(maxsize=4096)  # many splits share the same group of points
def _line(points: tuple[tuple[int, float], ...]) -> LogFit:
    return fit_logarithms([(1, size) for size, _ in points], [seconds for _, seconds in points])
