"""Cost models of all-reduce algorithms on N ranks, with S bytes per rank.

A cost is latency * a + volume * S / B + reduced * S * g. a is the seconds of an empty message, B a
link's bytes per second in one direction, g the seconds to add one byte. The three counts are those
of the busiest rank, one step after the other (Thakur, Rabenseifner and Gropp 2005; Chan et al.
2007).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ddpperf.analysis.logarithmic_fit import DIGITS, Estimate, Undetermined, fit_determined, held_out_error
from ddpperf.specs.collective import AllReduceSpec, ring_pieces


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The work of an all-reduce algorithm on its busiest rank: messages, bytes sent, bytes added.

    `latency` counts successive messages. `volume` is the bytes over a link, and `reduced` the bytes
    added, both in units of a rank's buffer.
    """

    latency: float
    volume: float
    reduced: float


def counts(algorithm: str, N: int, nbytes: float = 0) -> Counts:
    """Return the messages, sent bytes and added bytes of an all-reduce algorithm on N ranks.

    A ring sends a large buffer of `nbytes` bytes in pieces. Here all links are equal;
    `node_cost_model` has a slower link between nodes. Raises ValueError for fewer than two ranks, or
    an algorithm without a model.
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
        "gather_broadcast": Counts(latency=2, volume=2 * (N - 1), reduced=N - 1),
        "ring": Counts(latency=ring, volume=2 * (N - 1) / N, reduced=(N - 1) / N),
        "recursive_doubling": Counts(latency=rounds, volume=rounds, reduced=levels + extra),
        "halving_doubling": Counts(
            latency=levels + rounds, volume=2 * halved + 2 * extra, reduced=halved + extra
        ),
        "tree": Counts(latency=2 * all_levels, volume=2 * all_levels, reduced=all_levels),
    }
    if algorithm not in known:
        raise ValueError(f"{algorithm} has no cost model; those that have are {', '.join(known)}")
    return known[algorithm]


Times = Mapping[AllReduceSpec, float]  # the measured seconds of each all-reduce


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """A fitted cost model: seconds per message, per byte sent and per byte added.

    `reduce_seconds` is None if the model counts addition as a part of sending.
    """

    latency: Estimate
    byte_seconds: Estimate
    reduce_seconds: Estimate | None = None

    def seconds(self, call: AllReduceSpec) -> float:
        """Return the predicted seconds of an all-reduce."""
        cost = counts(call.algorithm, call.world_size, call.nbytes)
        reduce = self.reduce_seconds.value if self.reduce_seconds is not None else 0.0
        byte_seconds = cost.volume * self.byte_seconds.value + cost.reduced * reduce
        return cost.latency * self.latency.value + call.nbytes * byte_seconds


def fit_links(times: Times, *, reduction: bool) -> LinkModel:
    """Fit a cost model to measured all-reduces by least squares of logarithms.

    No value is negative. `reduction` says whether addition has its own value. Raises Undetermined
    if the times do not determine all values.
    """
    costs = [(call.nbytes, counts(call.algorithm, call.world_size, call.nbytes)) for call in times]
    rows = np.array([(cost.latency, cost.volume * size, cost.reduced * size) for size, cost in costs])
    latency, byte_seconds, *others = fit_determined(
        rows if reduction else rows[:, :2],
        list(times.values()),
        "these calls cannot separate the time of sending from that of adding; "
        "measure other sizes or algorithms",
    )
    return LinkModel(latency=latency, byte_seconds=byte_seconds, reduce_seconds=others[0] if others else None)


def choose_links(times: Times) -> tuple[LinkModel, float]:
    """Fit a cost model to all-reduces; cross-validation decides whether it has a term for adding buffers.

    Each of four or more sizes but the smallest and the largest is left out once. The second result
    is the median of |predicted / measured - 1| over sizes that neither the fit nor the choice used.
    Raises Undetermined.
    """
    return _best_links(times), held_out_error(times, lambda kept: _best_links(kept).seconds, nbytes_of)


def _best_links(times: Times) -> LinkModel:
    def error(reduction: bool) -> float:
        return held_out_error(times, lambda kept: fit_links(kept, reduction=reduction).seconds, nbytes_of)

    errors = {False: error(False)}
    with contextlib.suppress(Undetermined):
        errors[True] = error(True)
    return fit_links(times, reduction=min(errors, key=lambda reduction: round(errors[reduction], DIGITS)))


def nbytes_of(call: AllReduceSpec) -> int:
    return call.nbytes


# --- the formulas in course reports


@dataclass(frozen=True, kw_only=True)
class ReportFormula:
    """An all-reduce formula from course reports: N ranks, S bytes per rank and B bytes per second.

    `seconds` returns its value for N, S and B; a value in bytes is divided by B. `counts` says in a
    few words what the value is.
    """

    formula: str
    counts: str
    seconds: Callable[[int, float, float], float]


REPORT_FORMULAS = (
    ReportFormula(
        formula="2 (N-1) S / N",
        counts="bytes that one rank of a ring sends",
        seconds=lambda N, S, B: 2 * (N - 1) * S / N / B,
    ),
    ReportFormula(
        formula="(S / B) log2 N",
        counts="seconds of recursive doubling without latency",
        seconds=lambda N, S, B: S / B * math.log2(N),
    ),
    ReportFormula(
        formula="2 (N-1) S",
        counts="bytes that all ranks of a ring send together",
        seconds=lambda N, S, B: 2 * (N - 1) * S / B,
    ),
)
