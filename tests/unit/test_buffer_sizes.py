"""--buffer-sizes: every collective uses them, and a case that they do not fit is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ddpperf.plugin.cases import Case
from ddpperf.specs.collective import OWN_ALGORITHMS
from perf import test_all_reduce, test_projection
from perf.common.all_reduces import GPU_SIZES
from perf.test_all_reduce import OWN_SIZES, RING_SIZE
from tests.command_line import Read, is_skipped, specs_of

KiB, MiB = 2**10, 2**20


def sizes(cases: Iterable[Case]) -> list[int]:
    return [spec.nbytes for spec in specs_of(cases)]


def reasons(cases: Iterable[Any]) -> list[str]:
    return [case.marks[0].kwargs["reason"] for case in cases]


@pytest.mark.parametrize("gpus", [0, 2])
def test_given_sizes_are_used_by_every_experiment(read: Read, gpus: int) -> None:
    options = read("--buffer-sizes", "64KiB, 1MiB,4096,2MiB", gpus=gpus)
    given = [4 * KiB, 64 * KiB, MiB, 2 * MiB]
    assert options.links.buffer_sizes == tuple(given)
    for experiment in (test_all_reduce.calls, test_all_reduce.contests, test_all_reduce.collectives):
        assert sorted(set(sizes(experiment(options)))) == given
    assert sizes(test_all_reduce.largest(options)) == [2 * MiB]
    assert sizes(test_all_reduce.algorithms(options)) == [2 * MiB] * len(OWN_ALGORITHMS)


def test_default_sizes_on_gpus_grow_fourfold(read: Read) -> None:
    assert list(GPU_SIZES) == [4**power * KiB for power in range(11)]
    options = read(gpus=2)
    assert set(sizes(test_all_reduce.contests(options))) == set(GPU_SIZES)
    ours = [spec for spec in specs_of(test_all_reduce.calls(options)) if spec.algorithm in OWN_ALGORITHMS]
    assert {case.algorithm for case in ours if case.nbytes >= RING_SIZE} == {"ring"}
    assert set(sizes(test_all_reduce.algorithms(options))) == {16 * MiB}
    only_large = read("--buffer-sizes", "64MiB,128MiB,256MiB,512MiB")
    assert [spec.algorithm for spec in specs_of(test_all_reduce.algorithms(only_large))] == ["ring"]


def test_a_model_needs_four_sizes(read: Read) -> None:
    options = read("--buffer-sizes", "1MiB", "--world-sizes", "1,2,4")
    reason = "a model needs 4 buffer sizes or more, got 1; name more in --buffer-sizes"
    assert (
        reasons(test_all_reduce.largest(options))
        == reasons(test_all_reduce.algorithms(options))
        == [reason] * 2
    )
    assert reasons(test_projection.steps(options)) == [reason]
    assert set(sizes(test_all_reduce.calls(options))) == {MiB}


def test_buffer_too_small_for_the_ranks_is_skipped(read: Read) -> None:
    """A broadcast buffer need not be divided. Two ranks share the same part of the last two sizes."""
    cases = list(test_all_reduce.collectives(read("--buffer-sizes", "4,64KiB,65540")))
    measured = {
        kind: [spec.nbytes for spec in specs_of(cases) if spec.kind == kind] for kind in test_all_reduce.KINDS
    }
    assert measured == {kind: [64 * KiB] for kind in test_all_reduce.KINDS} | {
        "broadcast": [4, 64 * KiB, 65540]
    }
    skipped: list[Any] = [case for case in cases if is_skipped(case)]
    assert [case.id for case in skipped] == [
        f"2rank-4B-{kind}" for kind in test_all_reduce.KINDS if kind != "broadcast"
    ]
    assert set(reasons(skipped)) == {"4B is less than a float32 for each of 2 ranks; use a larger size"}


@pytest.mark.parametrize(("node", "world_sizes"), [(1, []), (2, [6, 4]), (3, [6]), (4, []), (8, [])])
def test_hierarchical_is_measured_on_whole_nodes(read: Read, node: int, world_sizes: list[int]) -> None:
    options = read("--world-sizes", "1,2,3,4,6")
    options = replace(options, links=replace(options.links, node=node))
    found = [
        (spec.world_size, spec.nbytes, spec.node_size)
        for spec in specs_of(test_all_reduce.calls(options))
        if spec.algorithm == "hierarchical"
    ]
    assert found == [(N, nbytes, node) for N in world_sizes for nbytes in (*OWN_SIZES, RING_SIZE)]


def test_one_rank_has_no_all_reduce(read: Read) -> None:
    cases = list(test_all_reduce.calls(read("--world-sizes", "1")))
    assert reasons(cases) == ["a collective needs two ranks or more; pass --world-sizes 1,2"]
