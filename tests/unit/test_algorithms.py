"""All-reduce algorithms give every rank the sum, for any world size, length and type."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.bandwidth import all_reduce_busbw, crossing_factor
from ddpperf.analysis.cost_models import counts
from ddpperf.collectives.algorithms import ALGORITHMS
from ddpperf.specs.collective import MOST_PIECES, PIECE_BYTES
from tests.generated import BOUNDED
from tests.thread_transport import buffers_of, reduced, reduced_on_nodes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@BOUNDED
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(1, 9), st.integers(0, 40), st.sampled_from(DTYPES))
def test_every_rank_has_the_sum(algorithm: str, world_size: int, count: int, dtype: torch.dtype) -> None:
    buffers = buffers_of(world_size, count, dtype)
    expected = torch.stack(buffers).sum(0, dtype=dtype)
    reduced(algorithm, buffers)
    for buffer in buffers:
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_have_the_same_bits(algorithm: str) -> None:
    """Otherwise DDP's replicas would drift apart."""
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(1000, generator=generator) for _ in range(7)]
    reduced(algorithm, buffers)
    assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)


@pytest.mark.parametrize("lanes", [2, MOST_PIECES])
def test_long_ring_travels_in_pieces(lanes: int) -> None:
    count = 3 * lanes * PIECE_BYTES // 4 + 5
    buffers = buffers_of(3, count, torch.float32)
    expected = torch.stack(buffers).sum(0)
    transports = reduced("ring", buffers)
    assert all(torch.equal(buffer, expected) for buffer in buffers)
    assert {transport.sent["messages"] for transport in transports} == {2 * (3 - 1) * lanes}
    assert counts("ring", 3, nbytes=4 * count).latency == 2 * (3 - 1) * lanes


@BOUNDED
@given(st.integers(2, 4), st.integers(2, 4), st.integers(0, 60), st.sampled_from(DTYPES))
def test_nodes_of_any_size_have_the_sum(nodes: int, node_size: int, count: int, dtype: torch.dtype) -> None:
    buffers = buffers_of(nodes * node_size, count, dtype)
    expected = torch.stack(buffers).sum(0, dtype=dtype)
    reduced_on_nodes(node_size, buffers)
    assert all(torch.equal(buffer, expected) for buffer in buffers)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (2, 3), (4, 2)])
def test_nodes_exchange_the_fewest_bytes(nodes: int, node_size: int, lanes: int) -> None:
    """These are 2 (M - 1) / M buffers from each of M nodes."""
    count = node_size * lanes * PIECE_BYTES // 4
    buffers = buffers_of(nodes * node_size, count, torch.float32)
    expected = torch.stack(buffers).sum(0)
    transports = reduced_on_nodes(node_size, buffers)
    assert all(torch.equal(buffer, expected) for buffer in buffers)
    for node in range(nodes):
        ranks = range(node * node_size, (node + 1) * node_size)
        messages = [sent for rank in ranks for sent in transports[rank].events if sent]
        leaving = [elements for receiver, elements in messages if receiver not in ranks]
        assert sum(leaving) == 2 * (nodes - 1) * count // nodes
        assert len(leaving) == 2 * (nodes - 1) * node_size * lanes


def test_nodes_exchange_a_piece_while_summing_others() -> None:
    """Otherwise the slow links between nodes would idle until the sums of whole nodes are there."""
    transports = reduced_on_nodes(2, buffers_of(4, 2 * 4 * PIECE_BYTES // 4, torch.float32))
    for rank, transport in enumerate(transports):
        first = next(
            index for index, sent in enumerate(transport.events) if sent and sent[0] // 2 != rank // 2
        )
        assert transport.events[:first].count(None) == 1


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
@pytest.mark.parametrize(("nodes", "node_size"), [(2, 2), (4, 2), (2, 4), (3, 2)])
def test_crossing_factor_counts_the_busiest_node(nodes: int, node_size: int, algorithm: str) -> None:
    """Bytes that a node sends to or receives from other nodes, over the bytes that busbw counts."""
    N, count = nodes * node_size, 240
    buffers = buffers_of(N, count, torch.float32)
    one_level = algorithm != "hierarchical"
    transports = reduced(algorithm, buffers) if one_level else reduced_on_nodes(node_size, buffers)
    crossing: Counter[tuple[str, int]] = Counter()
    for transport in transports:
        for receiver, elements in filter(None, transport.events):
            sending, receiving = transport.rank // node_size, receiver // node_size
            if sending != receiving:
                crossing += Counter({("sent", sending): elements, ("received", receiving): elements})
    factor = max(crossing.values()) / all_reduce_busbw(count, 1.0, N)
    assert factor == pytest.approx(crossing_factor(algorithm, N, node_size))


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_messages_agree_with_the_cost_models(world_size: int) -> None:
    """Compares the most that any rank sends: messages and volume in buffers."""
    N, count = world_size, 240
    levels = math.floor(math.log2(N))
    helps = 2**levels != N  # rank 0 has the sum of a rank beyond the power of two, and gives it back
    sent = {
        "gather_broadcast": (N - 1, N - 1.0),
        "ring": (2 * (N - 1), 2 * (N - 1) / N),
        "recursive_doubling": (levels + helps, levels + helps),
        "halving_doubling": (2 * levels + helps, 2 * (1 - 2**-levels) + helps),
        "tree": (math.ceil(math.log2(N)), math.ceil(math.log2(N))),
    }
    for algorithm, (messages, volume) in sent.items():
        transports = reduced(algorithm, buffers_of(N, count, torch.float32))
        assert max(one.sent["messages"] for one in transports) == messages, algorithm
        assert max(one.sent["elements"] for one in transports) / count == pytest.approx(volume), algorithm
