"""Simulate all-reduces on thousands of ranks of several nodes, message by message.

The messages are those of `ddpperf.collectives.algorithms`. A message starts when its sender has
sent its earlier messages, and both ends of the link are free. The message occupies the sender's end
of the link while its bytes are sent, and arrives one latency later. A rank goes on when it has sent
and received the messages of its step. Adding buffers takes no time, and buffers divide evenly.

A rank has one link to the other ranks of its node. A node has one network link. The messages of a
step that leave or enter a node share its network link equally, and those of an earlier step go
first. With this fixed order, a later start or a slower link never makes a rank finish earlier.
The cost models of `two_links` say where they equal the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ddpperf.analysis.two_links import Link
from ddpperf.specs.collective import ring_pieces

Floats = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with equally many consecutive ranks, and their links.

    inside: the link of a rank to its node. between: the network link of a node. slow_links: by node,
    network links that differ from `between`; a message takes as long as on the slower of its two
    links. start_seconds: when a straggler starts, by rank; other ranks start at 0. waits_for_receiver:
    whether a message starts only when the notice has arrived that its receiver is ready. gloo
    sends such a notice, which takes one latency.
    """

    nodes: int
    ranks_per_node: int
    inside: Link
    between: Link
    slow_links: Mapping[int, Link] = field(default_factory=dict)
    start_seconds: Mapping[int, float] = field(default_factory=dict)
    waits_for_receiver: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(f"a cluster needs 1 x 1 ranks or more, got {self.nodes} x {self.ranks_per_node}")
        if unknown := [node for node in self.slow_links if not 0 <= node < self.nodes]:
            raise ValueError(f"slow_links names node {unknown[0]} of {self.nodes} nodes; name existing nodes")
        if unknown := [rank for rank in self.start_seconds if not 0 <= rank < self.world_size]:
            raise ValueError(
                f"start_seconds names rank {unknown[0]} of {self.world_size}; name existing ranks"
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def finish_seconds(algorithm: str, cluster: Cluster, nbytes: float) -> Floats:
    """Return when each rank has finished an all-reduce of `nbytes` bytes per rank, in seconds.

    Raises ValueError for an algorithm other than those of `ALGORITHMS`.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{algorithm} has no simulation; pass one of {', '.join(ALGORITHMS)}")
    ranks = _SimulatedRanks(cluster)
    ALGORITHMS[algorithm](ranks, cluster, nbytes)
    return ranks.clock


@dataclass(frozen=True, kw_only=True)
class _Messages:
    """The messages of one step: their ranks, the indices of their links, and their seconds."""

    senders: Ranks
    receivers: Ranks
    out_links: Ranks
    in_links: Ranks
    latency: Floats
    seconds: Floats


class _SimulatedRanks:
    """All ranks' clocks, and when each end of a link is free, in seconds.

    The links of the N ranks come first, then those of the nodes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.clock = np.zeros(cluster.world_size)
        for rank, seconds in cluster.start_seconds.items():
            self.clock[rank] = seconds
        links = cluster.world_size + cluster.nodes
        self._out_free, self._in_free = np.zeros(links), np.zeros(links)
        networks = [cluster.slow_links.get(node, cluster.between) for node in range(cluster.nodes)]
        inside = [cluster.inside] * cluster.world_size
        self._latency = np.array([link.latency for link in inside + networks])
        self._byte_seconds = np.array([link.byte_seconds for link in inside + networks])

    def messages(self, senders: Ranks, receivers: Ranks, nbytes: float) -> _Messages:
        """Return the messages of one step, each of `nbytes` bytes."""
        nodes = [ranks // self.cluster.ranks_per_node for ranks in (senders, receivers)]
        crosses = nodes[0] != nodes[1]
        ends = [
            np.where(crosses, self.cluster.world_size + node, rank)
            for node, rank in zip(nodes, (senders, receivers), strict=True)
        ]
        byte_seconds = [self._byte_seconds[end] * np.bincount(end)[end] for end in ends]
        return _Messages(
            senders=senders,
            receivers=receivers,
            out_links=ends[0],
            in_links=ends[1],
            latency=np.maximum(*(self._latency[end] for end in ends)),
            seconds=nbytes * np.maximum(*byte_seconds),
        )

    def send(self, step: _Messages) -> tuple[Floats, Floats]:
        """Return when each message has left its sender, and when it has arrived."""
        start = np.maximum(self.clock[step.senders], self._out_free[step.out_links])
        start = np.maximum(start, self._in_free[step.in_links] - step.latency)
        if self.cluster.waits_for_receiver:
            start = np.maximum(start, self.clock[step.receivers] + step.latency)
        left = start + step.seconds
        arrived = left + step.latency
        np.maximum.at(self._out_free, step.out_links, left)
        np.maximum.at(self._in_free, step.in_links, arrived)
        return left, arrived


def _tree(ranks: _SimulatedRanks, cluster: Cluster, nbytes: float) -> None:
    N = cluster.world_size
    distances = [2**level for level in range((N - 1).bit_length())]
    upward = [(np.arange(distance, N, 2 * distance), -distance) for distance in distances]
    downward = [(np.arange(0, N - distance, 2 * distance), distance) for distance in reversed(distances)]
    for senders, distance in upward + downward:
        receivers = senders + distance
        left, arrived = ranks.send(ranks.messages(senders, receivers, nbytes))
        ranks.clock[senders] = left
        ranks.clock[receivers] = np.maximum(ranks.clock[receivers], arrived)


def _ring(ranks: _SimulatedRanks, cluster: Cluster, nbytes: float) -> None:
    N = cluster.world_size
    pieces = ring_pieces(nbytes, N)
    _in_pieces(ranks, [_around(ranks, np.arange(N), nbytes / N / pieces)] * (2 * (N - 1)), pieces)


def _hierarchical(ranks: _SimulatedRanks, cluster: Cluster, nbytes: float) -> None:
    nodes, local_ranks = cluster.nodes, cluster.ranks_per_node
    pieces = ring_pieces(nbytes, local_ranks)
    table = np.arange(cluster.world_size).reshape(nodes, local_ranks)
    part = nbytes / local_ranks / pieces
    inside = [_around(ranks, table, part)] * (local_ranks - 1)
    between = [_around(ranks, table.T, part / nodes)] * (2 * (nodes - 1))
    _in_pieces(ranks, inside + between + inside, pieces)


def _around(ranks: _SimulatedRanks, rings: Ranks, nbytes: float) -> _Messages:
    """Return the messages of a hop, in which each rank sends to the next one of its row."""
    return ranks.messages(rings.ravel(), np.roll(rings, -1, axis=-1).ravel(), nbytes)


def _in_pieces(ranks: _SimulatedRanks, hops: Sequence[_Messages], pieces: int) -> None:
    """Send pieces through the same hops; a piece waits for its own last hop, in the pieces' order."""
    done = [ranks.clock.copy() for _ in range(pieces)]
    for hop in hops:
        for piece in range(pieces):
            ranks.clock = np.maximum(ranks.clock, done[piece])
            left, arrived = ranks.send(hop)
            done[piece][hop.senders] = left
            done[piece][hop.receivers] = np.maximum(done[piece][hop.receivers], arrived)
    ranks.clock = np.maximum.reduce([ranks.clock, *done])


ALGORITHMS: dict[str, Callable[[_SimulatedRanks, Cluster, float], None]] = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
}
