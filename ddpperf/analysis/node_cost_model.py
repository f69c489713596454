"""Cost models of all-reduces on several nodes, with one link inside a node and one between nodes.

Consecutive ranks share a node. A node has one network link, which its ranks share. A cost is
messages * latency + volume * S * seconds per byte, summed over the two links, for S bytes per rank.
Adding buffers counts as a part of sending.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ddpperf.analysis.cost_models import Times, counts, nbytes_of
from ddpperf.analysis.logarithmic_fit import Estimate, Undetermined, fit_determined, held_out_error
from ddpperf.specs.collective import AllReduceSpec, ring_pieces


@dataclass(frozen=True, kw_only=True)
class Load:
    """The messages and bytes that an all-reduce sends over one link one after another.

    `messages` counts these successive messages. `volume` is their bytes in one direction, in units of
    a rank's buffer.
    """

    messages: float = 0.0
    volume: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TwoLinkCounts:
    """The loads of an all-reduce on the links inside the nodes and on the links between the nodes."""

    inside: Load
    between: Load


def two_link_counts(algorithm: str, N: int, node_size: int, nbytes: float = 0) -> TwoLinkCounts:
    """Return the successive messages and bytes of an all-reduce on N ranks over both links.

    A node has `node_size` ranks. On one node, the counts are those of `cost_models.counts`.

    On several nodes, with L = node_size and M = N / L:
    - ring: each of 2(N-1) hops takes as long as its slowest message, which crosses nodes. This is
      exact if a message starts only when its receiver is ready, as in gloo. Otherwise a segment
      crosses nodes in one of L hops, and the messages are an upper bound.
    - hierarchical: 2(L-1) hops inside with S/L, and 2(M-1) hops between nodes, in which the L ranks
      of a node send S/(L M) each. This is exact.
    - tree: exact if L and M are powers of two, otherwise an approximation.

    A large buffer travels in pieces. Between nodes, sending then hides all latencies but one, which
    is exact while the other pieces of a hop take longer than the latency. While some pieces cross
    nodes, others move inside a node. So of the 2(L-1) p messages inside a node, a hierarchical
    all-reduce of p pieces hides all but 2((L-2) p + 1). Each piece counts as a message there, since a
    message costs processor time. Both are approximations. Raises ValueError for an incomplete node,
    or an algorithm without a model.
    """
    if node_size >= N:
        ring = "ring" if algorithm == "hierarchical" else algorithm
        one_link = counts(ring, N, nbytes)
        return TwoLinkCounts(inside=Load(messages=one_link.latency, volume=one_link.volume), between=Load())
    if N % node_size:
        raise ValueError(f"{N} ranks fill no whole nodes of {node_size}; pass a multiple of {node_size}")
    nodes = N // node_size
    if algorithm == "ring":
        return TwoLinkCounts(inside=Load(), between=_ring_between(N, ring_pieces(nbytes, N)))
    if algorithm == "hierarchical":
        pieces = ring_pieces(nbytes, node_size)
        shown = 2 * ((node_size - 2) * pieces + 1) if node_size > 1 else 0
        inside = Load(messages=shown, volume=shown / pieces / node_size)
        return TwoLinkCounts(inside=inside, between=_ring_between(nodes, pieces))
    if algorithm == "tree":
        inside_levels, levels = (2 * math.ceil(math.log2(number)) for number in (node_size, nodes))
        return TwoLinkCounts(
            inside=Load(messages=inside_levels, volume=inside_levels),
            between=Load(messages=levels, volume=levels),
        )
    raise ValueError(f"{algorithm} has no cost model for several nodes; pass ring, hierarchical or tree")


def _ring_between(members: int, pieces: int) -> Load:
    hops = 2 * (members - 1)
    return Load(messages=hops if pieces == 1 else 1, volume=hops / members)


# --- the fit to measured times


@dataclass(frozen=True, kw_only=True)
class FittedLink:
    """A link's fitted seconds per message and seconds per byte.

    Between our own all-reduces' ranks, a message of gloo takes two delays of the network: the
    receiver's notice that it is ready, and the message itself.
    """

    latency: Estimate
    byte_seconds: Estimate


@dataclass(frozen=True, kw_only=True)
class TwoLinkModel:
    """A fitted cost model of all-reduces on several nodes of `node_size` consecutive ranks.

    `inside` is None if no measured all-reduce sent messages inside a node.
    """

    node_size: int
    inside: FittedLink | None
    between: FittedLink

    def seconds(self, call: AllReduceSpec) -> float:
        """Return the predicted seconds of an all-reduce. Raises Undetermined for an unknown link."""
        counted = two_link_counts(call.algorithm, call.world_size, self.node_size, call.nbytes)
        seconds = 0.0
        for load, link in ((counted.inside, self.inside), (counted.between, self.between)):
            if link is None and load != Load():
                raise Undetermined(
                    "no measured all-reduce used the link inside a node; measure one that does"
                )
            if link is not None:
                byte_seconds = load.volume * link.byte_seconds.value
                seconds += load.messages * link.latency.value + call.nbytes * byte_seconds
        return seconds


def fit_two_links(times: Times, node_size: int) -> TwoLinkModel:
    """Fit both links to the measured seconds of all-reduces by least squares of logarithms.

    Flat and hierarchical all-reduces are fitted together. No value is negative. Raises Undetermined
    if the times do not determine all values, or if no all-reduce crossed nodes.
    """
    rows = []
    for call in times:
        counted = two_link_counts(call.algorithm, call.world_size, node_size, call.nbytes)
        loads = counted.inside, counted.between
        rows.append([part for load in loads for part in (load.messages, load.volume * call.nbytes)])
    table = np.array(rows, dtype=float).reshape(-1, 4)
    if not table[:, 2:].any():
        raise Undetermined("no measured all-reduce crossed nodes; measure world sizes of several nodes")
    estimates = fit_determined(
        table if table[:, :2].any() else table[:, 2:],
        list(times.values()),
        "these all-reduces cannot separate latency and bandwidth inside and between nodes; "
        "measure other sizes, or flat and hierarchical all-reduces",
    )
    *inside, between = (
        FittedLink(latency=latency, byte_seconds=byte_seconds)
        for latency, byte_seconds in zip(estimates[::2], estimates[1::2], strict=True)
    )
    return TwoLinkModel(node_size=node_size, inside=inside[0] if inside else None, between=between)


def two_links_and_error(times: Times, node_size: int) -> tuple[TwoLinkModel, float]:
    """Fit both links to measured all-reduces, and return the model and its prediction error.

    At least four buffer sizes are needed. Each size between the smallest and the largest is once
    predicted from a fit to the other sizes. The error is the median of |predicted / measured - 1|
    over these predictions. Raises Undetermined.
    """
    error = held_out_error(times, lambda kept: fit_two_links(kept, node_size).seconds, nbytes_of)
    return fit_two_links(times, node_size), error
