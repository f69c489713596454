"""Cost models of all-reduce algorithms on N ranks, with S bytes per rank, on one node or on several.

A cost is latency * a + volume * S / B for each link, plus reduced * S * g. a is the seconds of an
empty message, B a link's bytes per second in one direction, g the seconds to add one byte. The counts
are those of the busiest rank, one step after the other (Thakur, Rabenseifner and Gropp 2005; Chan et
al. 2007). Consecutive ranks share a node. A node has one network link, which its ranks share. On
several nodes, adding buffers counts as a part of sending.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ddpperf.analysis.logarithmic_fit import DIGITS, Undetermined, fit_logarithms, held_out_error
from ddpperf.analysis.statistics import Estimate
from ddpperf.specs.collective import AllReduceSpec, ring_pieces


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


# --- the formulas in course reports


class ReportFormula(NamedTuple):
    """An all-reduce formula from course reports: N ranks, S bytes per rank and B bytes per second.

    `seconds` returns its value for N, S and B; a value in bytes is divided by B.
    """

    formula: str
    seconds: Callable[[int, float, float], float]


REPORT_FORMULAS = (
    ReportFormula(
        "2 (N-1) S / N",
        lambda N, S, B: 2 * (N - 1) * S / N / B,
    ),
    ReportFormula(
        "(S / B) log2 N",
        lambda N, S, B: S / B * math.log2(N),
    ),
    ReportFormula(
        "2 (N-1) S",
        lambda N, S, B: 2 * (N - 1) * S / B,
    ),
)
