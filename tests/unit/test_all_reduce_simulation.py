"""The simulated all-reduces: equal to the real algorithms' messages and to the cost model."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpperf.analysis.all_reduce_simulation import ALGORITHMS, Cluster, Floats, finish_seconds
from ddpperf.analysis.two_links import Link, two_link_counts
from ddpperf.collectives import algorithms
from ddpperf.collectives.algorithms import Route, Transport
from tests.thread_transport import LOST_SECONDS, ThreadTransport, buffers_of, run_in_threads

KiB, MiB = 2**10, 2**20
INSIDE = Link(latency=10e-6, byte_seconds=1 / 5e9)
NETWORK = Link(latency=1e-3, byte_seconds=1 / 125e6)
FAST = Link(latency=5e-6, byte_seconds=1 / 50e9)
SLOW = Link(latency=3e-3, byte_seconds=1 / 20e6)


def cluster(
    nodes: int, ranks_per_node: int, *, network: Link = NETWORK, waits_for_receiver: bool = False
) -> Cluster:
    return Cluster(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        inside=INSIDE,
        between=network,
        waits_for_receiver=waits_for_receiver,
    )


@dataclass
class Message:
    """A message of a rank at a point of simulated time. `previous` used the same link before it."""

    ready: float
    previous: Message | None
    left: float = 0.0
    has_left: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> float:
        assert self.has_left.wait(LOST_SECONDS)
        return self.left


class ClockTransport(Transport):
    """A rank in a thread, whose clock shows simulated seconds.

    A rank's links are used by this rank alone, as in a ring, or in a tree whose nodes have a
    power-of-two number of ranks. sharing: how many ranks of a node send to other nodes at the same
    time, each at an equal part of the network link's rate.
    """

    def __init__(
        self,
        carrier: ThreadTransport,
        cluster: Cluster,
        boxes: dict[tuple[int, int], queue.Queue[Message]],
        sharing: int,
    ) -> None:
        self.rank, self.world_size = carrier.rank, carrier.world_size
        self.clock = cluster.start_seconds.get(self.rank, 0.0)
        self._carrier, self._cluster, self._boxes, self._sharing = carrier, cluster, boxes, sharing
        self._last_sent: dict[bool, Message] = {}
        self._in_free: dict[bool, float] = defaultdict(float)

    def _crosses(self, other: int) -> bool:
        return other // self._cluster.ranks_per_node != self.rank // self._cluster.ranks_per_node

    def _link(self, other: int) -> Link:
        if not self._crosses(other):
            return self._cluster.inside
        ends = [
            self._cluster.slow_links.get(rank // self._cluster.ranks_per_node, self._cluster.between)
            for rank in (self.rank, other)
        ]
        return Link(
            latency=max(end.latency for end in ends),
            byte_seconds=self._sharing * max(end.byte_seconds for end in ends),
        )

    def start(self, sends: Sequence[Route], receives: Sequence[Route]) -> Callable[[], None]:
        wait_for_data, posted, sent = self._carrier.start(sends, receives), self.clock, []
        for _, receiver in sends:
            message = Message(ready=self.clock, previous=self._last_sent.get(self._crosses(receiver)))
            self._last_sent[self._crosses(receiver)] = message
            self._boxes[self.rank, receiver].put(message)
            sent.append(message)

        def wait() -> None:
            for tensor, sender in receives:
                message = self._boxes[sender, self.rank].get(timeout=LOST_SECONDS)
                link, crosses = self._link(sender), self._crosses(sender)
                left = message.previous.wait() if message.previous else 0.0
                notice = posted + link.latency if self._cluster.waits_for_receiver else 0.0
                start = max(message.ready, left, notice, self._in_free[crosses] - link.latency)
                message.left = start + tensor.numel() * tensor.element_size() * link.byte_seconds
                message.has_left.set()
                self._in_free[crosses] = message.left + link.latency
                self.clock = max(self.clock, self._in_free[crosses])
            self.clock = max(self.clock, *(message.wait() for message in sent), 0.0)
            wait_for_data()

        return wait


def run_real_algorithm(algorithm: str, cluster: Cluster, nbytes: int) -> list[float]:
    """Run an all-reduce of this project between threads, and return each rank's simulated clock."""
    N = cluster.world_size
    boxes: dict[tuple[int, int], queue.Queue[Message]] = {
        (one, other): queue.Queue() for one in range(N) for other in range(N)
    }
    buffers = buffers_of(N, nbytes // 4, torch.float32)
    clocks = [0.0] * N
    on_nodes = {"node_size": cluster.ranks_per_node} if algorithm == "hierarchical" else {}
    sharing = on_nodes.get("node_size", 1)

    def work(carrier: ThreadTransport) -> None:
        transport = ClockTransport(carrier, cluster, boxes, sharing)
        getattr(algorithms, algorithm)(buffers[carrier.rank], transport, **on_nodes)
        clocks[carrier.rank] = transport.clock

    run_in_threads(N, work)
    return clocks


@pytest.mark.parametrize("waits_for_receiver", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "nodes", "ranks_per_node", "nbytes"),
    [
        ("ring", 3, 1, 9 * MiB),  # in three pieces
        ("ring", 2, 3, 6 * KiB),
        ("tree", 5, 1, 8 * KiB),
        ("tree", 4, 2, 8 * KiB),
    ],
)
def test_messages_are_those_of_the_algorithm(
    algorithm: str, nodes: int, ranks_per_node: int, nbytes: int, waits_for_receiver: bool
) -> None:
    disturbed = Cluster(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        inside=INSIDE,
        between=NETWORK,
        slow_links={1: SLOW},
        start_seconds={1: 0.8e-3, 2: 5e-3, nodes * ranks_per_node - 1: 1.7e-3},
        waits_for_receiver=waits_for_receiver,
    )
    clocks = run_real_algorithm(algorithm, disturbed, nbytes)
    assert clocks == pytest.approx(finish_seconds(algorithm, disturbed, nbytes), rel=1e-9)


@pytest.mark.parametrize("waits_for_receiver", [False, True])
@pytest.mark.parametrize("network", [NETWORK, FAST])
@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "nbytes"),
    [(2, 2, 8 * MiB), (3, 3, 9 * KiB), (3, 2, 9 * MiB), (2, 3, 9 * MiB)],  # in up to four pieces
)
def test_messages_are_those_of_the_hierarchical_algorithm(
    nodes: int, ranks_per_node: int, nbytes: int, network: Link, waits_for_receiver: bool
) -> None:
    """All ranks of a node start together, so that they share its network link equally."""
    late = range(ranks_per_node, 2 * ranks_per_node)
    disturbed = Cluster(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        inside=INSIDE,
        between=network,
        slow_links={0: SLOW} if network is NETWORK else {},
        start_seconds=dict.fromkeys(late, 0.8e-3),
        waits_for_receiver=waits_for_receiver,
    )
    clocks = run_real_algorithm("hierarchical", disturbed, nbytes)
    assert clocks == pytest.approx(finish_seconds("hierarchical", disturbed, nbytes), rel=1e-9)


def last(algorithm: str, on: Cluster, nbytes: float) -> float:
    return float(finish_seconds(algorithm, on, nbytes).max())


def modelled(algorithm: str, on: Cluster, nbytes: float, *, delays: int = 1) -> float:
    """Return the cost model's seconds. delays: the link's latencies that a message takes."""
    inside, between = (
        Link(latency=delays * link.latency, byte_seconds=link.byte_seconds)
        for link in (on.inside, on.between)
    )
    counted = two_link_counts(algorithm, on.world_size, on.ranks_per_node, nbytes)
    return counted.seconds(nbytes, inside=inside, between=between)


@pytest.mark.parametrize("nbytes", [64 * KiB, 16 * MiB])
@pytest.mark.parametrize("N", [2, 3, 4, 7, 64])
def test_ring_on_equal_links_is_the_model(N: int, nbytes: int) -> None:
    assert last("ring", cluster(N, 1), nbytes) == pytest.approx(modelled("ring", cluster(N, 1), nbytes), 1e-9)
    equal = cluster(2, N, network=INSIDE)
    assert last("ring", equal, 64 * KiB) == pytest.approx(modelled("ring", equal, 64 * KiB), 1e-9)


@pytest.mark.parametrize("nbytes", [64 * KiB, 16 * MiB])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (8, 1), (1, 8), (4, 2), (1024, 1)])
def test_power_of_two_tree_is_the_model(nodes: int, ranks_per_node: int, nbytes: int) -> None:
    on = cluster(nodes, ranks_per_node)
    assert last("tree", on, nbytes) == pytest.approx(modelled("tree", on, nbytes), 1e-9)


@pytest.mark.parametrize("waits_for_receiver", [False, True])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 2), (8, 2), (3, 5), (256, 8)])
def test_hierarchical_is_the_model(nodes: int, ranks_per_node: int, waits_for_receiver: bool) -> None:
    on = cluster(nodes, ranks_per_node, waits_for_receiver=waits_for_receiver)
    found = last("hierarchical", on, 64 * KiB)
    assert found == pytest.approx(modelled("hierarchical", on, 64 * KiB, delays=1 + waits_for_receiver), 1e-9)


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_hierarchical_pieces_hide_latencies(nodes: int) -> None:
    on = cluster(nodes, 2)
    assert last("hierarchical", on, 64 * MiB) == pytest.approx(modelled("hierarchical", on, 64 * MiB), 1e-9)


@pytest.mark.parametrize("nbytes", [64 * KiB, 16 * MiB])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (3, 2), (4, 4)])
def test_waiting_ring_moves_in_lock_step(nodes: int, ranks_per_node: int, nbytes: int) -> None:
    """Each message takes two latencies: the receiver's notice, and its own."""
    on = cluster(nodes, ranks_per_node, waits_for_receiver=True)
    assert last("ring", on, nbytes) == pytest.approx(modelled("ring", on, nbytes, delays=2), 1e-9)


def test_free_ring_is_faster_than_lock_step() -> None:
    """A segment crosses nodes in every second hop only."""
    assert last("ring", cluster(2, 2), 64 * KiB) < 0.6 * modelled("ring", cluster(2, 2), 64 * KiB)
    large = 64 * MiB
    assert last("ring", cluster(2, 2), large) == pytest.approx(modelled("ring", cluster(2, 2), large), 1e-9)


def test_hierarchical_sends_less_between_nodes() -> None:
    """2 (N-1)/N of the buffer over 2 (M-1)/M: 1.5 on 2 nodes of 2 ranks."""
    on = cluster(2, 2)
    assert last("ring", on, 64 * MiB) / last("hierarchical", on, 64 * MiB) == pytest.approx(1.5, rel=0.01)


def test_straggler_delays_all_ranks() -> None:
    late = Cluster(nodes=4, ranks_per_node=2, inside=INSIDE, between=NETWORK, start_seconds={5: 2.0})
    for algorithm in ALGORITHMS:
        assert finish_seconds(algorithm, late, MiB).min() > 2.0


LINKS = st.builds(
    Link,
    latency=st.floats(min_value=0, max_value=1e-2),
    byte_seconds=st.floats(min_value=0, max_value=1e-6),
)
SIZES = st.integers(min_value=1, max_value=64 * MiB)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes, ranks_per_node = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    ranks = st.integers(0, nodes * ranks_per_node - 1)
    return Cluster(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        inside=draw(LINKS),
        between=draw(LINKS),
        slow_links=draw(st.dictionaries(st.integers(0, nodes - 1), LINKS, max_size=2)),
        start_seconds=draw(st.dictionaries(ranks, st.floats(0, 1), max_size=3)),
        waits_for_receiver=draw(st.booleans()),
    )


def changed(on: Cluster, **fields: object) -> Cluster:
    return Cluster(**{**vars(on), **fields})


def no_earlier(later: Floats, sooner: Floats) -> bool:
    return bool((later >= sooner * (1 - 1e-12)).all())


@settings(max_examples=60, deadline=None)
@given(
    on=clusters(),
    nbytes=SIZES,
    rank=st.integers(0, 23),
    delay=st.floats(0, 1),
    algorithm=st.sampled_from([*ALGORITHMS]),
)
def test_straggler_never_helps(on: Cluster, nbytes: int, rank: int, delay: float, algorithm: str) -> None:
    straggler = rank % on.world_size
    start = on.start_seconds.get(straggler, 0.0) + delay
    late = changed(on, start_seconds={**on.start_seconds, straggler: start})
    assert no_earlier(finish_seconds(algorithm, late, nbytes), finish_seconds(algorithm, on, nbytes))


@settings(max_examples=60, deadline=None)
@given(
    on=clusters(),
    nbytes=SIZES,
    node=st.integers(0, 5),
    factor=st.floats(1, 10),
    algorithm=st.sampled_from([*ALGORITHMS]),
)
def test_slower_link_never_helps(on: Cluster, nbytes: int, node: int, factor: float, algorithm: str) -> None:
    link = on.slow_links.get(node % on.nodes, on.between)
    slower = Link(latency=link.latency * factor, byte_seconds=link.byte_seconds * factor)
    slowed = changed(on, slow_links={**on.slow_links, node % on.nodes: slower})
    assert no_earlier(finish_seconds(algorithm, slowed, nbytes), finish_seconds(algorithm, on, nbytes))


@settings(max_examples=60, deadline=None)
@given(on=clusters(), nbytes=SIZES, algorithm=st.sampled_from([*ALGORITHMS]))
def test_bytes_bound_the_finish(on: Cluster, nbytes: int, algorithm: str) -> None:
    """Every node sends so much of the buffer; in a tree, a leaf sends and receives all of it."""
    N, nodes = on.world_size, on.nodes
    least = {"ring": 2 * (N - 1) / N, "hierarchical": 2 * (nodes - 1) / nodes, "tree": 2}[algorithm]
    byte_seconds = [on.slow_links.get(node, on.between).byte_seconds for node in range(nodes)]
    bound = least * nbytes * min(byte_seconds) if nodes > 1 else 0.0
    assert last(algorithm, on, nbytes) >= bound * (1 - 1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_thousand_nodes_take_seconds(algorithm: str) -> None:
    start = time.process_time()
    last(algorithm, cluster(1024, 2), 64 * MiB)
    assert time.process_time() - start < 10


def test_wrong_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match="slow_links names node 4 of 4 nodes"):
        Cluster(nodes=4, ranks_per_node=1, inside=INSIDE, between=NETWORK, slow_links={4: SLOW})
    with pytest.raises(ValueError, match="start_seconds names rank 8 of 8"):
        Cluster(nodes=4, ranks_per_node=2, inside=INSIDE, between=NETWORK, start_seconds={8: 1.0})
    with pytest.raises(ValueError, match="a cluster needs 1 x 1 ranks or more, got 0 x 1"):
        cluster(0, 1)
    with pytest.raises(ValueError, match="a link needs finite seconds of 0 or more"):
        Link(latency=-1.0, byte_seconds=1 / 1e9)
    with pytest.raises(ValueError, match="halving has no simulation; pass one of ring, tree"):
        finish_seconds("halving", cluster(2, 1), MiB)
