"""Cost models of all-reduces on several nodes, with one link inside a node and one between nodes.

Consecutive ranks share a node. A node has one network link, which its ranks share. A cost is
messages * latency + volume * S * seconds per byte, summed over the two links, for S bytes per rank.
Adding buffers counts as a part of sending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddpperf.analysis.cost_models import LinkModel, Times, counts, nbytes_of
from ddpperf.analysis.logarithmic_fit import fit_determined, held_out_error
from ddpperf.specs.collective import AllReduceSpec, ring_pieces


class Load(NamedTuple):
    """The messages and bytes that an all-reduce sends over one link one after another.

    `messages` counts these successive messages. `volume` is their bytes in one direction, in units of
    a rank's buffer.
    """

    messages: float = 0.0
    volume: float = 0.0


def two_link_counts(algorithm: str, N: int, node_size: int, nbytes: float = 0) -> tuple[Load, Load]:
    """Return the loads of an all-reduce on N ranks on the links inside the nodes and between them.

    A node has `node_size` ranks. On one node, the counts are those of `cost_models.counts`.

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
        one_link = counts(algorithm, N, nbytes)
        return Load(one_link.latency, one_link.volume), Load()
    if algorithm == "ring":
        return Load(), _ring_between(N, ring_pieces(nbytes, N))
    if algorithm == "hierarchical":
        pieces = ring_pieces(nbytes, node_size)
        shown = 2 * ((node_size - 2) * pieces + 1)
        return Load(shown, shown / pieces / node_size), _ring_between(N // node_size, pieces)
    raise ValueError(f"{algorithm} has no cost model for several nodes; pass ring or hierarchical")


def _ring_between(members: int, pieces: int) -> Load:
    hops = 2 * (members - 1)
    return Load(hops if pieces == 1 else 1, hops / members)


@dataclass(frozen=True, kw_only=True)
class TwoLinkModel:
    """A fitted cost model of all-reduces on several nodes of `node_size` consecutive ranks.

    `inside` is None if no measured all-reduce sent messages inside a node. Between our own
    all-reduces' ranks, a message of gloo takes two delays of the network: the receiver's notice that
    it is ready, and the message itself.
    """

    node_size: int
    inside: LinkModel | None
    between: LinkModel

    def seconds(self, call: AllReduceSpec) -> float:
        """Return the predicted seconds of an all-reduce. A link that is None takes no time."""
        loads = two_link_counts(call.algorithm, call.world_size, self.node_size, call.nbytes)
        return sum(
            load.messages * link.latency.value + load.volume * call.nbytes * link.byte_seconds.value
            for load, link in zip(loads, (self.inside, self.between), strict=True)
            if link is not None
        )


def fit_two_links(times: Times, node_size: int) -> TwoLinkModel:
    """Fit both links to the measured seconds of all-reduces by least squares of logarithms.

    Flat and hierarchical all-reduces are fitted together. No value is negative. Some of the
    all-reduces must cross nodes. Raises Undetermined if the times do not determine all values.
    """
    loads = [two_link_counts(call.algorithm, call.world_size, node_size, call.nbytes) for call in times]
    rows = [
        [part for load in both for part in (load.messages, load.volume * call.nbytes)]
        for call, both in zip(times, loads, strict=True)
    ]
    table = np.array(rows, dtype=float)
    estimates = fit_determined(
        table if table[:, :2].any() else table[:, 2:],
        list(times.values()),
        "these all-reduces cannot separate latency and bandwidth inside and between nodes; "
        "measure other sizes, or flat and hierarchical all-reduces",
    )
    *inside, between = (
        LinkModel(latency=latency, byte_seconds=byte_seconds)
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
