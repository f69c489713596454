"""Collectives between real ranks pass the check of their results."""

from __future__ import annotations

import pytest

from ddpperf.specs import AllReduceSpec, CollectiveSpec
from ddpperf.specs.collective import OWN_ALGORITHMS, Algorithm, CollectiveKind, ElementType
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_collective_passes_its_check(two_ranks: Pool, kind: CollectiveKind, dtype: ElementType) -> None:
    spec = CollectiveSpec(world_size=2, nbytes=12 * 100, kind=kind, dtype=dtype)
    assert two_ranks.measure(spec).iterations >= 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("algorithm", ["backend", *OWN_ALGORITHMS])
@pytest.mark.parametrize("in_place", [True, False])
def test_all_reduce_passes_its_check(
    two_ranks: Pool, algorithm: Algorithm, in_place: bool, dtype: ElementType
) -> None:
    spec = AllReduceSpec(world_size=2, nbytes=4 * 100, algorithm=algorithm, in_place=in_place, dtype=dtype)
    assert two_ranks.measure(spec).iterations >= 1


@pytest.mark.slow
def test_hierarchical_passes_its_check() -> None:
    spec = AllReduceSpec(world_size=4, nbytes=4 * 1001, algorithm="hierarchical", node_size=2)
    with Pool(SetOptions(size=4, device="cpu", rounds=1, deadline_seconds=60)) as pool:
        assert pool.measure(spec).iterations >= 1
