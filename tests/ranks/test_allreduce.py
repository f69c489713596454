"""All-reduce algorithms: the sum on every rank, of any number of ranks, length and type; and what each sends."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddpperf.analysis.cost_models import counts
from ddpperf.collectives.algorithms import ALGORITHMS, all_reduce
from ddpperf.collectives.transports import GroupTransport, ThreadTransport, exchange, run_in_threads
from ddpperf.specs.collective import MOST_PIECES, PIECE_BYTES
from tests.generated import BOUNDED

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def buffers_of(world_size: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Small whole numbers, which every type adds up exactly in any order, and no two ranks' alike."""
    return [((torch.arange(count) * (rank + 2) + rank) % 5).to(dtype) for rank in range(world_size)]


def reduced(algorithm: str, buffers: list[Tensor], *, mean: bool = False) -> list[ThreadTransport]:
    """In place, on as many ranks as there are buffers."""
    return run_in_threads(
        len(buffers), lambda transport: all_reduce(buffers[transport.rank], algorithm, transport, mean=mean)
    )


@BOUNDED
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(1, 9), st.integers(0, 40), st.sampled_from(DTYPES))
def test_every_rank_has_the_sum(algorithm: str, world_size: int, count: int, dtype: torch.dtype) -> None:
    buffers = buffers_of(world_size, count, dtype)
    expected = torch.stack(buffers).sum(0, dtype=dtype)
    reduced(algorithm, buffers)
    for buffer in buffers:
        assert torch.equal(buffer, expected)


def reduce_as_rank(rank: int, world_size: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    transport = GroupTransport()
    for algorithm, dtype, count in itertools.product(ALGORITHMS, DTYPES, (0, 1, 7, 300)):
        buffers = buffers_of(world_size, count, dtype)
        all_reduce(buffers[rank], algorithm, transport)
        expected = torch.stack(buffers_of(world_size, count, dtype)).sum(0, dtype=dtype)
        assert torch.equal(buffers[rank], expected), (algorithm, dtype, count)
    for algorithm, count in itertools.product(
        ALGORITHMS, (7, 2 * world_size * PIECE_BYTES // 4 + 5)
    ):  # in pieces, too
        means = buffers_of(world_size, count, torch.float32)
        expected = torch.stack(means).mean(0)
        all_reduce(means[rank], algorithm, transport, mean=True)
        torch.testing.assert_close(means[rank], expected)
    dist.destroy_process_group()


def test_ranks_of_a_process_group_have_the_sum_of_any_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(reduce_as_rank, (3, tmp_path / "store"), nprocs=3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_mean_is_the_sum_over_the_number_of_ranks(algorithm: str, world_size: int) -> None:
    buffers = buffers_of(world_size, 7, torch.float64)
    expected = torch.stack(buffers).mean(0)
    reduced(algorithm, buffers, mean=True)
    for buffer in buffers:
        torch.testing.assert_close(buffer, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_have_the_same_bits(algorithm: str) -> None:
    """Where adding rounds, each element is added up in one order, whoever has it: DDP's replicas must not drift apart."""
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(1000, generator=generator) for _ in range(7)]
    reduced(algorithm, buffers)
    assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)


@pytest.mark.parametrize("lanes", [2, MOST_PIECES])
def test_a_long_ring_travels_in_pieces(lanes: int) -> None:
    count = 3 * lanes * PIECE_BYTES // 4 + 5
    buffers = buffers_of(3, count, torch.float32)
    expected = torch.stack(buffers).sum(0)
    transports = reduced("ring", buffers)
    assert all(torch.equal(buffer, expected) for buffer in buffers)
    assert {transport.sent["messages"] for transport in transports} == {2 * (3 - 1) * lanes}
    assert counts("ring", 3, nbytes=4 * count).latency == 2 * (3 - 1) * lanes


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_what_is_sent_is_what_the_cost_models_say(world_size: int) -> None:
    """The most that any rank sends, as whole buffers, and in how many messages."""
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
        assert max(each.sent["messages"] for each in transports) == messages, algorithm
        assert max(each.sent["elements"] for each in transports) / count == pytest.approx(volume), algorithm


def test_what_cannot_be_reduced_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"works on a contiguous buffer, got strides \(1, 3\); pass buffer.contiguous\(\)"
    ):
        reduced("ring", [torch.ones(2, 3).t() for _ in range(2)])
    with pytest.raises(
        ValueError,
        match=r"an all_reduce is by gather_broadcast, ring, .*, tree, got 'star'; name one of them",
    ):
        reduced("star", [torch.ones(2)])
    with pytest.raises(
        ValueError, match=r"a mean needs a floating point type, got torch.int64; sum it, or convert it"
    ):
        reduced("tree", [torch.ones(2, dtype=torch.int64) for _ in range(2)], mean=True)


def test_what_is_changed_or_read_while_it_is_under_way_is_seen() -> None:
    """As a backend may send a tensor at any moment until its wait is over, and receive it in any."""

    def changes(transport: ThreadTransport) -> None:
        mine, theirs = torch.ones(3), torch.empty(3)
        wait = transport.start([(mine, 1 - transport.rank)], [(theirs, 1 - transport.rank)])
        mine.zero_()
        wait()

    with pytest.raises(RuntimeError, match=r"what rank \d sends to \d was changed before it was sent"):
        run_in_threads(2, changes)
    read = []

    def reads(transport: ThreadTransport) -> None:
        mine, theirs = torch.ones(3), torch.ones(3)
        wait = transport.start([(mine, 1 - transport.rank)], [(theirs, 1 - transport.rank)])
        read.append(theirs.clone())
        wait()
        exchange(transport, [(mine, 1 - transport.rank)], [(theirs, 1 - transport.rank)])
        assert torch.equal(theirs, mine)

    run_in_threads(2, reads)
    assert not any((each == 1).any() for each in read)
