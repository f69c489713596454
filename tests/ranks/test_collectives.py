"""Collectives between real ranks pass the check of their results."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpperf.collectives.algorithms import ALGORITHMS, Transport
from ddpperf.specs import OWN_ALGORITHMS, Algorithm, AllReduceSpec, CollectiveKind, CollectiveSpec
from ddpperf.specs.collective import PIECE_BYTES
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests.thread_transport import buffers_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_collective_passes_its_check(two_ranks: Pool, kind: CollectiveKind) -> None:
    assert two_ranks.measure(CollectiveSpec(world_size=2, nbytes=12 * 100, kind=kind)).iterations >= 1


@pytest.mark.parametrize("algorithm", ["backend", *OWN_ALGORITHMS])
@pytest.mark.parametrize("in_place", [True, False])
def test_all_reduce_passes_its_check(two_ranks: Pool, algorithm: Algorithm, in_place: bool) -> None:
    spec = AllReduceSpec(world_size=2, nbytes=4 * 100, algorithm=algorithm, in_place=in_place)
    assert two_ranks.measure(spec).iterations >= 1


@pytest.mark.slow
def test_hierarchical_passes_its_check() -> None:
    spec = AllReduceSpec(world_size=4, nbytes=4 * 1001, algorithm="hierarchical", node_size=2)
    with Pool(SetOptions(size=4, device="cpu", rounds=1, deadline_seconds=60)) as pool:
        assert pool.measure(spec).iterations >= 1


def reduce_as_rank(rank: int, world_size: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    transport = Transport()
    for algorithm, dtype, count in itertools.product(ALGORITHMS, DTYPES, (0, 1, 7, 300)):
        buffers = buffers_of(world_size, count, dtype)
        ALGORITHMS[algorithm](buffers[rank], transport)
        expected = torch.stack(buffers_of(world_size, count, dtype)).sum(0, dtype=dtype)
        assert torch.equal(buffers[rank], expected), (algorithm, dtype, count)
    count = 2 * world_size * PIECE_BYTES // 4 + 5  # in pieces, too
    for algorithm in ALGORITHMS:
        buffers = buffers_of(world_size, count, torch.float32)
        expected = torch.stack(buffers).sum(0)
        ALGORITHMS[algorithm](buffers[rank], transport)
        assert torch.equal(buffers[rank], expected), algorithm
    dist.destroy_process_group()


@pytest.mark.slow
def test_process_group_sums_any_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(reduce_as_rank, (3, tmp_path / "store"), nprocs=3)
