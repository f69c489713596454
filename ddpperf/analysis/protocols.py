"""The seconds of a library's call over the size of its buffer: lines, of which it takes the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import log
from statistics import median

import numpy as np

from ddpperf.analysis.log_fit import Estimate, LogFit, fit_logarithms, spread_of

MOST_LINES = 3  # of a library's protocols
FEWEST_SIZES = 4  # a model is chosen by sizes between others that are left out
DIGITS = 3  # of an error: what differs by less is as good


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A library that chooses among protocols as the buffer grows: the least of lines, seconds = start + nbytes * slope."""

    lines: tuple[tuple[float, float], ...]

    @property
    def byte_seconds(self) -> float:
        """Of the last bytes of a large buffer: the least slope."""
        return min(slope for _, slope in self.lines)

    def seconds(self, nbytes: float) -> float:
        return min(start + nbytes * slope for start, slope in self.lines)


def fit_envelope(sizes: Sequence[int], seconds: Sequence[float], *, lines: int) -> Envelope:
    """So many lines, each through sizes next to each other, where the logarithms are off by the least in square.

    Raises ValueError for fewer than two sizes a line.
    """
    return _envelope(_fits(sorted(zip(sizes, seconds, strict=True)), lines))


Points = Sequence[tuple[int, float]]


def _fits(order: Points, lines: int) -> list[LogFit]:
    """Of the runs of points that are best fitted by a line each."""
    if len(order) < 2 * lines:
        raise ValueError(f"{lines} lines need {2 * lines} sizes or more, got {len(order)}; measure more")

    def squares(fits: list[LogFit]) -> float:
        envelope = _envelope(fits)
        return sum(log(envelope.seconds(size) / took) ** 2 for size, took in order)

    return min(([_line(tuple(part)) for part in parts] for parts in _splits(order, lines)), key=squares)


def _envelope(fits: Iterable[LogFit]) -> Envelope:
    return Envelope(lines=tuple((float(fit.values[0]), float(fit.values[1])) for fit in fits))


def _splits(points: Points, parts: int) -> Iterable[list[Points]]:
    """All ways to cut the points into so many runs of two or more."""
    if parts == 1:
        yield [points]
        return
    for cut in range(2, len(points) - 2 * (parts - 1) + 1):
        for rest in _splits(points[cut:], parts - 1):
            yield [points[:cut], *rest]


@lru_cache(maxsize=4096)  # the same runs of points are parts of many splits
def _line(points: tuple[tuple[int, float], ...]) -> LogFit:
    return fit_logarithms([(1, size) for size, _ in points], [took for _, took in points])


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """As many lines as have the least error on sizes that were left out. latency: the least start of a line; byte_seconds: the
    least slope; both with intervals, of what all lines leave. held_out_error: the median of
    |predicted / measured - 1| of sizes that were left out of fit and choice alike (nested cross-validation: Varma and Simon
    2006), for the error that a model was chosen by is less than new sizes show."""

    envelope: Envelope
    latency: Estimate
    byte_seconds: Estimate
    held_out_error: float


def choose_envelope(sizes: Sequence[int], seconds: Sequence[float]) -> Chosen:
    """By leaving out each size in turn, but the least and the greatest: beyond what was measured nothing is known of protocols.

    Raises ValueError for fewer than four sizes.
    """
    require_sizes(len(set(sizes)))
    order = sorted(zip(sizes, seconds, strict=True))
    most = min(
        MOST_LINES, (len(order) - 2) // 2
    )  # that can be fitted where two sizes are left out, of fit and choice
    fits = _fits(order, _best_lines(order, most))
    left = spread_of(np.concatenate([fit.logarithms for fit in fits]), 2 * len(fits))
    starts, slopes = zip(*(fit.estimates(*left) for fit in fits), strict=True)
    return Chosen(
        envelope=_envelope(fits),
        latency=min(starts, key=lambda each: each.value),
        byte_seconds=min(slopes, key=lambda each: each.value),
        held_out_error=_held_out(order, lambda kept: _predict(kept, _best_lines(kept, most))),
    )


def _best_lines(points: Points, most: int) -> int:
    """The fewest of those that are as good."""
    errors = {lines: _held_out(points, partial(_predict, lines=lines)) for lines in range(1, most + 1)}
    return min(errors, key=lambda lines: round(errors[lines], DIGITS))


def _predict(points: Points, lines: int) -> Callable[[int], float]:
    return fit_envelope([size for size, _ in points], [took for _, took in points], lines=lines).seconds


def _held_out(points: Points, fit: Callable[[Points], Callable[[int], float]]) -> float:
    """The median error on each point but the ends, of what the others are fitted by."""
    left_out = range(1, len(points) - 1)
    fitted = {place: fit([*points[:place], *points[place + 1 :]]) for place in left_out}
    return median(abs(fitted[place](points[place][0]) / points[place][1] - 1) for place in left_out)


def require_sizes(number: int) -> None:
    """Raises ValueError for fewer than FEWEST_SIZES."""
    if number < FEWEST_SIZES:
        raise ValueError(f"choosing a model needs four sizes or more, got {number}; measure more")
