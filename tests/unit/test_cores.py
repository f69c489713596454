"""The cores of ranks and controller: the plan, the kernel's files, and a simulated kernel that pins."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.machine import cores, gpu_description
from ddpperf.machine.cores import MIN_CORES, Nodes, Pinning, Plan, numa_nodes, share_cores
from ddpperf.specs import EpochSpec
from ddpperf.specs.training_step import Strategy
from tests.fake_nvml import healthy, install
from tests.generated import BOUNDED


def node(first: int, last: int) -> list[tuple[int, ...]]:
    """Return the cores `first` to `last`, without hyperthreads."""
    return [(core,) for core in range(first, last + 1)]


def span(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


@pytest.mark.parametrize(
    ("nodes", "rank_nodes", "ranks", "controller"),
    [
        ({0: node(0, 7)}, [None] * 2, [span(2, 4), span(5, 7)], (0, 1)),
        ({0: node(0, 63)}, [0] * 4, [span(4, 18), span(19, 33), span(34, 48), span(49, 63)], span(0, 3)),
        (
            {0: node(0, 7), 1: node(8, 15)},
            [None] * 4,
            [(2, 3, 4), (5, 6, 7), (10, 11, 12), (13, 14, 15)],
            (0, 1, 8, 9),
        ),
        ({0: node(0, 3), 1: node(4, 7)}, [1, 1], [(4, 5), (6, 7)], span(0, 3)),  # near their GPUs
        ({0: node(0, 2), 2: node(3, 5)}, [2, 7], [(1, 2), (4, 5)], (0, 3)),  # no cores in node 7
        ({0: [(0, 8), (1, 9), (2, 10), (3, 11)]}, [None] * 2, [(2, 10), (3, 11)], (0, 1, 8, 9)),
        ({0: [(0,), (1, 2), (3, 4)]}, [None] * 2, [(1, 2), (3, 4)], (0,)),
    ],
)
def test_controller_has_the_first_cores_of_each_node(
    nodes: Nodes, rank_nodes: list[int | None], ranks: list[tuple[int, ...]], controller: tuple[int, ...]
) -> None:
    assert share_cores(nodes, rank_nodes) == Plan(ranks=tuple(ranks), controller=controller)


@pytest.mark.parametrize(
    ("nodes", "rank_nodes", "found"),
    [
        ({0: node(0, 3)}, [None] * 2, 4),
        ({0: node(0, 31), 1: node(32, 34)}, [1, 1], 35),
        ({0: [(0, 1, 2, 3), (4, 5, 6, 7)]}, [None] * 2, 8),
    ],
)
def test_too_few_cores_give_a_reason(nodes: Nodes, rank_nodes: list[int | None], found: int) -> None:
    assert share_cores(nodes, rank_nodes) == (
        "not pinned: 2 ranks and the controller need 5 cores, near their GPUs and in whole physical cores, "
        f"found {found}"
    )


@st.composite
def machines(draw: st.DrawFn) -> tuple[Nodes, list[int | None]]:
    """Nodes of up to 9 physical cores with gaps in their numbers, and ranks' nodes, some unknown."""
    numbers = itertools.count()
    threads = st.lists(st.integers(1, 3), min_size=1, max_size=9)
    nodes = {
        number: [tuple(2 * next(numbers) for _ in range(count)) for count in draw(threads)]
        for number in draw(st.sampled_from([[0], [0, 1], [1, 3], [0, 1, 2]]))
    }
    return nodes, draw(st.lists(st.none() | st.sampled_from([0, 1, 3]), min_size=1, max_size=5))


@BOUNDED
@given(machines())
def test_shares_are_disjoint_equal_and_of_one_node(machine: tuple[Nodes, list[int | None]]) -> None:
    nodes, rank_nodes = machine
    planned = share_cores(nodes, rank_nodes)
    if isinstance(planned, str):
        return
    owners = [*planned.ranks, planned.controller]
    for cpu in itertools.chain(*nodes.values()):
        assert sum(not set(cpu).isdisjoint(share) for share in owners) <= 1, "whole physical cores"
    given_out = [*planned.controller, *itertools.chain(*planned.ranks)]
    assert len(given_out) == len(set(given_out))
    assert len(planned.ranks) == len(rank_nodes)
    assert planned.controller
    assert len({len(share) for share in planned.ranks}) == 1
    assert len(planned.ranks[0]) >= MIN_CORES
    for share, home in zip(planned.ranks, rank_nodes, strict=True):
        (number,) = (number for number, cpus in nodes.items() if {*itertools.chain(*cpus)} & {*share})
        assert number == home or not set(rank_nodes) <= nodes.keys()
        places = [place for place, cpu in enumerate(nodes[number]) if {*cpu} & {*share}]
        assert max(places) - min(places) < len(places), "contiguous"


def test_nodes_and_hyperthreads_are_read_from_the_kernel(tmp_path: Path) -> None:
    for number, listed in {0: "0-1,4-5", 1: "", 10: "2-3,6-7,9"}.items():  # a node of memory alone has none
        folder = tmp_path / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
    for core in range(8):
        folder = tmp_path / "cpu" / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert numa_nodes(range(10), tmp_path) == {0: [(0, 4), (1, 5)], 10: [(2, 6), (3, 7), (9,)]}
    assert numa_nodes([0, 4, 5], tmp_path) == {0: [(0, 4), (5,)]}
    assert numa_nodes([3, 1], tmp_path / "nothing") == {0: [(1,), (3,)]}


@pytest.mark.parametrize(
    ("address", "node"),
    [
        ("0000000A:4B:00.0", 2),
        ("00000000:5C:00.0", None),  # a virtual machine's kernel says -1
        ("", None),
    ],
)
def test_gpu_has_the_node_of_its_slot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, node: int | None
) -> None:
    for slot, text in {"000a:4b:00.0": "2", "0000:5c:00.0": "-1"}.items():
        (tmp_path / "sys/bus/pci/devices" / slot).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / slot / "numa_node").write_text(f"{text}\n")
    monkeypatch.setattr(gpu_description, "Path", lambda first, *rest: Path(tmp_path, first[1:], *rest))
    info = SimpleNamespace(busId=address)
    install(monkeypatch, [healthy(PciInfo=info, NumaNodeId=3)])  # 3: the node of the GPU's own memory
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = gpu_description.visible_gpus()
    assert gpu.numa_node == node


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel with 16 cores in two nodes, which grants this process all cores that it requests."""
    now = {0: set(range(16))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(now[process]))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, asked: now.update({process: set(asked)}))
    monkeypatch.setattr(cores, "core_count", lambda: 16)
    monkeypatch.setattr(cores, "numa_nodes", lambda _: {0: node(0, 7), 1: node(8, 15)})
    yield
    assert now == {0: set(range(16))}, "given back"


@pytest.mark.usefixtures("sixteen")
def test_controller_is_off_the_ranks_until_released() -> None:
    pinning = Pinning(2, [replace(healthy().gpu, numa_node=numa_node) for numa_node in (1, 0, 1)])
    ranks = (span(9, 15), span(1, 7))
    assert pinning.ranks == ranks
    assert os.sched_getaffinity(0) == set(range(16)), "ranks start on all cores"
    pinning.hold()
    assert os.sched_getaffinity(0) == {0, 8}
    assert pinning.environment() == {"pinning": {"controller": (0, 8), "ranks": ranks}}
    pinning.release()


@pytest.mark.usefixtures("sixteen")
def test_crowded_cores_give_a_warning() -> None:
    def warnings(world_size: int, loader_workers: int, most_ranks: int | None = None) -> list[str]:
        strategy: Strategy = "single" if world_size == 1 else "ddp"
        fields: dict[str, Any] = {"per_rank_batch_size": 2, "input": "dataloader", "strategy": strategy}
        spec = EpochSpec(world_size=world_size, loader_workers=loader_workers, **fields)
        return pinning.warnings(spec, most_ranks)

    pinning = Pinning(2, [])
    assert warnings(1, loader_workers=6) == []
    assert warnings(1, loader_workers=7) == ["8 processes share 7 cores"]
    assert warnings(2, loader_workers=6) == []
    assert warnings(2, loader_workers=7) == ["16 processes share 14 cores"]
    assert warnings(4, loader_workers=6, most_ranks=2) == [], "two of the ranks are on another node"
    assert warnings(4, loader_workers=6) == ["28 processes share 16 cores"], "a larger set is not pinned"
    pinning = Pinning(16, [])
    assert warnings(1, loader_workers=15) == []
    assert warnings(1, loader_workers=16) == ["17 processes share 16 cores"]


@pytest.mark.usefixtures("sixteen")
def test_quota_prevents_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "core_count", lambda: 8)
    pinning = Pinning(2, [])
    assert pinning.ranks is None
    assert str(pinning.environment()["pinning"]).startswith("not pinned: the control group has a quota of 8")
