"""What an all_reduce must cost: of N ranks and S bytes a rank, by messages' latency, a link's bandwidth, and adding up.

A cost is latency * a + volume * S / B + reduced * S * g: a is the seconds of a message without its bytes, B a link's bytes per
second in one direction, g the seconds to add up a byte. The three counts are of the rank that has the most to do, one step
after the other (Thakur, Rabenseifner and Gropp 2005; Chan et al. 2007).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from ddpperf.analysis.log_fit import Estimate, fit_logarithms, spread_of
from ddpperf.analysis.protocols import DIGITS, require_sizes
from ddpperf.specs.collective import ring_pieces


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of an algorithm with N ranks: messages one after the other, whole buffers that a link carries, and that are added up."""

    latency: float
    volume: float
    reduced: float


def counts(algorithm: str, N: int, nbytes: float = 0) -> Counts:
    """Of a buffer of `nbytes` bytes a rank: a ring sends a large one in more messages than a small one.

    Raises ValueError for fewer than two ranks, or an algorithm without a model.
    """
    if N < 2:
        raise ValueError(f"a cost model needs two ranks or more, got {N}")
    levels = math.floor(math.log2(N))
    helps = 0 if 2**levels == N else 1  # ranks beyond a power of two give their buffers away, and get the sum
    share = 1 - 2.0**-levels
    known = {
        "gather_broadcast": Counts(latency=2, volume=2 * (N - 1), reduced=N - 1),
        "ring": Counts(
            latency=2 * (N - 1) * ring_pieces(nbytes, N), volume=2 * (N - 1) / N, reduced=(N - 1) / N
        ),
        "recursive_doubling": Counts(
            latency=levels + 2 * helps, volume=levels + 2 * helps, reduced=levels + helps
        ),
        "halving_doubling": Counts(
            latency=2 * levels + 2 * helps, volume=2 * share + 2 * helps, reduced=share + helps
        ),
        "tree": Counts(
            latency=2 * math.ceil(math.log2(N)),
            volume=2 * math.ceil(math.log2(N)),
            reduced=math.ceil(math.log2(N)),
        ),
    }
    if algorithm not in known:
        raise ValueError(f"{algorithm} has no cost model; those that have are {', '.join(known)}")
    return known[algorithm]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured call: the seconds of `nbytes` bytes a rank."""

    algorithm: str
    N: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Fitted: latency in seconds, seconds to send a byte (the inverse of the bandwidth), and to add one up; None if that is not
    told apart from sending."""

    latency: Estimate
    byte_seconds: Estimate
    reduce_seconds: Estimate | None

    @property
    def bandwidth(self) -> Estimate:
        """Bytes per second; infinite where sending may cost nothing that can be seen."""
        return self.byte_seconds.inverse()

    def seconds(self, algorithm: str, N: int, nbytes: int) -> float:
        each = counts(algorithm, N, nbytes)
        reduce = self.reduce_seconds.value if self.reduce_seconds is not None else 0.0
        return each.latency * self.latency.value + nbytes * (
            each.volume * self.byte_seconds.value + each.reduced * reduce
        )


class NotToldApart(ValueError):
    """Every split between two of a model's values fits as well."""


def fit_links(cases: Sequence[Case], *, reduction: bool) -> LinkModel:
    """The model whose logarithms are off by the least in square, over all cells at once; none of its values is negative.

    Raises ValueError for cells of one size, from which latency and bandwidth cannot be told apart, and NotToldApart for others
    that leave open what a message's start, sending and adding up take.
    """
    if len({case.nbytes for case in cases}) < 2:
        raise ValueError("a fit needs two sizes or more, got one; measure another")
    rows = np.array([_row(case, reduction=reduction) for case in cases])
    seconds = [case.seconds for case in cases]
    scaled = rows / np.array(seconds)[:, None]
    if np.linalg.matrix_rank(scaled / np.abs(scaled).max(axis=0)) < rows.shape[1]:
        raise NotToldApart(
            "a fit needs calls that tell what sending and adding up take apart; measure other sizes or algorithms"
        )
    fit = fit_logarithms(rows.tolist(), seconds)
    latency, byte_seconds, *others = fit.estimates(*spread_of(fit.logarithms, len(fit.values)))
    return LinkModel(latency=latency, byte_seconds=byte_seconds, reduce_seconds=others[0] if others else None)


@dataclass(frozen=True, kw_only=True)
class ChosenLinks:
    """The model, with a reduction of its own or without, that has the least error on sizes that were left out. held_out_error:
    the median of |predicted / measured - 1| over the cells of sizes that were left out of fit and choice alike."""

    model: LinkModel
    held_out_error: float


def choose_links(cases: Sequence[Case]) -> ChosenLinks:
    """By leaving out all cells of one size, for each but the least and the greatest in turn.

    Raises ValueError for fewer than four sizes, and NotToldApart.
    """
    require_sizes(len({case.nbytes for case in cases}))
    return ChosenLinks(model=_best_links(cases), held_out_error=_held_out(cases, _best_links))


def _best_links(cases: Sequence[Case]) -> LinkModel:
    errors = {False: _held_out(cases, partial(fit_links, reduction=False))}
    with contextlib.suppress(NotToldApart):
        errors[True] = _held_out(cases, partial(fit_links, reduction=True))
    return fit_links(cases, reduction=min(errors, key=lambda reduction: round(errors[reduction], DIGITS)))


def _held_out(cases: Sequence[Case], fit: Callable[[Sequence[Case]], LinkModel]) -> float:
    """The median error on the cells of each size but the ends, of what the others are fitted by."""
    errors = []
    for left_out in sorted({case.nbytes for case in cases})[1:-1]:
        model = fit([case for case in cases if case.nbytes != left_out])
        errors += [
            abs(model.seconds(case.algorithm, case.N, case.nbytes) / case.seconds - 1)
            for case in cases
            if case.nbytes == left_out
        ]
    return median(errors)


def _row(case: Case, *, reduction: bool) -> list[float]:
    each = counts(case.algorithm, case.N, case.nbytes)
    return [each.latency, each.volume * case.nbytes, *([each.reduced * case.nbytes] if reduction else [])]


# --- what reports of such measurements write, and what it describes


@dataclass(frozen=True, kw_only=True)
class Execution:
    """formula: as it is written, of N ranks, S bytes a rank, B bytes per second. describes: what its value is, and is not.
    is_time: whether that is seconds, or bytes."""

    name: str
    formula: str
    value: Callable[[int, float, float], float]
    describes: str
    is_time: bool = False

    def seconds(self, N: int, S: float, B: float) -> float:
        """What a report makes of it: bytes over one link's bandwidth."""
        return self.value(N, S, B) / (1 if self.is_time else B)


FORMS = (
    Execution(
        name="ring_bytes",
        formula="2 (N-1) S / N",
        value=lambda N, S, B: 2 * (N - 1) * S / N,
        describes="the bytes that each rank sends in a ring, the least that the busiest rank can do with where only ranks add "
        "up; no time; from S on two ranks to below 2 S on many",
    ),
    Execution(
        name="doubling_seconds",
        formula="(S / B) log2 N",
        value=lambda N, S, B: S / B * math.log2(N),
        is_time=True,
        describes="the seconds of recursive doubling without latency, where N is a power of two; not what a ring takes, nor a "
        "tree, which takes twice as long",
    ),
    Execution(
        name="aggregate_bytes",
        formula="2 (N-1) S",
        value=lambda N, S, B: 2 * (N - 1) * S,
        describes="the bytes that all ranks of a ring send together, or what rank 0 of gather and broadcast moves; over one "
        "link's B it is N times a ring's seconds, for all links work at once",
    ),
)
