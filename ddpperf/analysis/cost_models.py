"""Cost models of all-reduces on N ranks, with S bytes per rank, and their fits to measured times.

The cost of an algorithm is latency * a + volume * S / B for each link, plus reduced * S * g. a is the
seconds of an empty message, B a link's bytes per second in one direction, g the seconds to add one
byte. The counts are those of the busiest rank, one step after the other (Thakur, Rabenseifner and Gropp
2005; Chan et al. 2007). Consecutive ranks share a node. A node has one network link, which its ranks
share. On several nodes, adding buffers counts as a part of sending. The cost of a library is the least
of several lines over the buffer size, one for each protocol, because it chooses the fastest protocol.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ddpperf.analysis.statistics import CONFIDENCE, Estimate, t_quantile
from ddpperf.specs.collective import AllReduceSpec, ring_pieces

NEGLIGIBLE = 1e-6  # a part below this fraction of every measured time counts as 0
DIGITS = 3  # prediction errors that agree to this many digits count as equal
Array = npt.NDArray[np.float64]
MOST_LINES = 3  # the number of protocols of a library
FEWEST_SIZES = 4  # cross-validation leaves out each size but the first and last

Points = Sequence[tuple[int, float]]  # buffer sizes in bytes, with seconds
Lines = Sequence[tuple[float, float]]  # the start of each line in seconds, and its seconds per byte


# --- fits


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


# --- ddpperf's algorithms


class Counts(NamedTuple):
    """The work of an all-reduce algorithm on a link: messages, bytes sent, bytes added.

    `latency` counts successive messages. `volume` is the bytes in one direction, and `reduced` the
    bytes added, both in units of a rank's buffer.
    """

    latency: float = 0.0
    volume: float = 0.0
    reduced: float = 0.0


def counts(algorithm: str, N: int, nbytes: float = 0) -> Counts:
    """Return the messages, sent bytes and added bytes of an all-reduce algorithm on N ranks.

    All links are equal. A ring sends a large buffer of `nbytes` bytes in pieces. Raises ValueError
    for fewer than two ranks, or an algorithm without a model.
    """
    if N < 2:
        raise ValueError(f"a cost model needs two ranks or more, got {N}")
    levels, all_levels = math.floor(math.log2(N)), math.ceil(math.log2(N))
    # Ranks beyond a power of two hand over their buffers first, and get the sum back at the end.
    extra = all_levels - levels
    halved = 1 - 2.0**-levels
    rounds = levels + 2 * extra
    ring = 2 * (N - 1) * ring_pieces(nbytes, N)
    known = {
        "gather_broadcast": Counts(2, 2 * (N - 1), N - 1),
        "ring": Counts(ring, 2 * (N - 1) / N, (N - 1) / N),
        "recursive_doubling": Counts(rounds, rounds, levels + extra),
        "halving_doubling": Counts(levels + rounds, 2 * halved + 2 * extra, halved + extra),
        "tree": Counts(2 * all_levels, 2 * all_levels, all_levels),
    }
    if algorithm not in known:
        raise ValueError(f"{algorithm} has no cost model; those that have are {', '.join(known)}")
    return known[algorithm]


def counts_by_link(algorithm: str, N: int, node_size: int, nbytes: float = 0) -> tuple[Counts, Counts]:
    """Return an all-reduce's counts for the links inside the nodes, and for the links between nodes.

    A node has `node_size` ranks. On one node, the counts are those of `counts`.

    On several nodes, with L = node_size and M = N / L:
    - ring: each of 2(N-1) hops takes as long as its slowest message, which crosses nodes. This is
      exact if a message starts only when its receiver is ready, as in gloo. Otherwise a segment
      crosses nodes in one of L hops, and the messages are an upper bound.
    - hierarchical: 2(L-1) hops inside with S/L, and 2(M-1) hops between nodes, in which the L ranks
      of a node send S/(L M) each. This is exact.

    A large buffer travels in pieces. Between nodes, sending then hides all latencies but one, which
    is exact while the other pieces of a hop take longer than the latency. While some pieces cross
    nodes, others move inside a node. So of the 2(L-1) p messages inside a node, a hierarchical
    all-reduce of p pieces hides all but 2((L-2) p + 1). Each piece counts as a message there, since a
    message costs processor time. Both are approximations. Raises ValueError for an algorithm without a
    model.
    """
    if node_size >= N:
        return counts(algorithm, N, nbytes), Counts()
    if algorithm == "ring":
        return Counts(), _ring_between(N, ring_pieces(nbytes, N))
    if algorithm == "hierarchical":
        pieces = ring_pieces(nbytes, node_size)
        shown = 2 * ((node_size - 2) * pieces + 1)
        return Counts(shown, shown / pieces / node_size), _ring_between(N // node_size, pieces)
    raise ValueError(f"{algorithm} has no cost model for several nodes; pass ring or hierarchical")


def _ring_between(members: int, pieces: int) -> Counts:
    hops = 2 * (members - 1)
    return Counts(hops if pieces == 1 else 1, hops / members)


Times = Mapping[AllReduceSpec, float]  # the measured seconds of each all-reduce
# What an all-reduce does. On one node, all is inside.
UNITS = ("message inside", "byte inside", "message between", "byte between", "byte added")


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A fitted cost model of all-reduces on nodes of `node_size` consecutive ranks.

    unit_seconds: the seconds of one of each of `UNITS`. Without "byte added", addition counts as a
    part of sending. What no measured all-reduce did is missing. Between our own all-reduces' ranks,
    a message of gloo takes two delays of the network: the receiver's notice that it is ready, and
    the message itself.
    """

    node_size: int
    unit_seconds: Mapping[str, Estimate]

    def seconds(self, call: AllReduceSpec) -> float:
        """Return the predicted seconds of an all-reduce."""
        units = _units(call, self.node_size)
        return sum(units[unit] * estimate.value for unit, estimate in self.unit_seconds.items())


def _units(call: AllReduceSpec, node_size: int) -> dict[str, float]:
    """Return how many of each unit in `UNITS` an all-reduce needs in sequence."""
    S = call.nbytes
    inside, between = counts_by_link(call.algorithm, call.world_size, node_size, S)
    numbers = (inside.latency, inside.volume * S, between.latency, between.volume * S, inside.reduced * S)
    return dict(zip(UNITS, numbers, strict=True))


def fit_cost_model(times: Times, node_size: int, *, adding: bool) -> CostModel:
    """Fit a cost model to measured all-reduces by least squares of logarithms.

    All all-reduces are fitted together. No value is negative. `adding` says whether addition has its
    own value. Raises Undetermined if the times do not determine all values.
    """
    calls = [_units(call, node_size) for call in times]
    units = [unit for unit in UNITS[: None if adding else -1] if any(call[unit] for call in calls)]
    numbers = np.array([[call[unit] for unit in units] for call in calls])
    scaled = numbers / np.array(list(times.values()))[:, None]
    if np.linalg.matrix_rank(scaled / np.abs(scaled).max(axis=0)) < len(units):
        raise Undetermined(
            f"these all-reduces cannot separate the seconds per {', '.join(units)}; "
            "measure other sizes or algorithms"
        )
    fit = fit_logarithms(numbers.tolist(), list(times.values()))
    estimates = fit.estimates(fit.residuals, len(units))
    return CostModel(node_size=node_size, unit_seconds=dict(zip(units, estimates, strict=True)))


def choose_cost_model(times: Times, node_size: int) -> tuple[CostModel, float]:
    """Fit a cost model to all-reduces, and return it with its prediction error.

    On one node, cross-validation decides whether the model has a term for adding buffers. Each of
    four or more sizes but the smallest and the largest is left out once. The error is the median of
    |predicted / measured - 1| over sizes that neither the fit nor the choice used. Raises
    Undetermined.
    """
    several = any(call.world_size > node_size for call in times)
    fit = partial(fit_cost_model, adding=False) if several else _fit_with_or_without_adding
    error = held_out_error(times, lambda kept: fit(kept, node_size).seconds, nbytes_of)
    return fit(times, node_size), error


def _fit_with_or_without_adding(times: Times, node_size: int) -> CostModel:
    def error(adding: bool) -> float:
        fit = partial(fit_cost_model, node_size=node_size, adding=adding)
        return held_out_error(times, lambda kept: fit(kept).seconds, nbytes_of)

    errors = {False: error(False)}
    with contextlib.suppress(Undetermined):
        errors[True] = error(True)
    best = min(errors, key=lambda adding: round(errors[adding], DIGITS))
    return fit_cost_model(times, node_size, adding=best)


def nbytes_of(call: AllReduceSpec) -> int:
    return call.nbytes


# --- libraries


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
        return sum(math.log(seconds_by(lines, size) / seconds) ** 2 for size, seconds in points)

    cuts = combinations(range(2, len(points) - 1), number - 1)
    splits = ([points[a:b] for a, b in pairwise((0, *inner, len(points)))] for inner in cuts)
    fits = ([_line(tuple(part)) for part in parts] for parts in splits if min(map(len, parts)) > 1)
    return min(fits, key=squares)


def _lines(fits: Sequence[LogFit]) -> Lines:
    return [(float(fit.values[0]), float(fit.values[1])) for fit in fits]


@lru_cache(maxsize=4096)  # many splits share the same group of points
def _line(points: tuple[tuple[int, float], ...]) -> LogFit:
    return fit_logarithms([(1, size) for size, _ in points], [seconds for _, seconds in points])


# --- the formulas in course reports

# From N ranks, S bytes per rank and B bytes per second to seconds; a formula for bytes is divided by B
REPORT_FORMULAS: dict[str, Callable[[int, float, float], float]] = {
    "2 (N-1) S / N": lambda N, S, B: 2 * (N - 1) * S / N / B,
    "(S / B) log2 N": lambda N, S, B: S / B * math.log2(N),
    "2 (N-1) S": lambda N, S, B: 2 * (N - 1) * S / B,
}
