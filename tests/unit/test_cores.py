"""The plan of cores for ranks and controller, and how the kernel's files are read."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.machine import hardware
from ddpperf.machine.cores import MIN_CORES, Nodes, Plan, numa_nodes, share_cores
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
        ({0: node(0, 4)}, [None, 0], [(1, 2), (3, 4)], (0,)),
        ({0: node(0, 63)}, [0] * 4, [span(4, 18), span(19, 33), span(34, 48), span(49, 63)], span(0, 3)),
        (
            {0: node(0, 7), 1: node(8, 15)},
            [None] * 4,
            [(2, 3, 4), (5, 6, 7), (10, 11, 12), (13, 14, 15)],
            (0, 1, 8, 9),
        ),
        ({0: node(0, 3), 1: node(4, 7)}, [1, 1], [(4, 5), (6, 7)], span(0, 3)),  # near their GPUs
        (
            {0: node(0, 7), 1: node(8, 15)},
            [1, None, None, 1],
            [(10, 11, 12), (2, 3, 4), (5, 6, 7), (13, 14, 15)],
            (0, 1, 8, 9),
        ),
        ({0: node(0, 2), 2: node(3, 5)}, [2, 7], [(4, 5), (1, 2)], (0, 3)),  # no cores in node 7
        ({0: [(0, 8), (1, 9), (2, 10), (3, 11)]}, [None] * 2, [(2, 10), (3, 11)], (0, 1, 8, 9)),
        ({0: [(0,), (1, 2), (3, 4)]}, [None] * 2, [(1, 2), (3, 4)], (0,)),
    ],
)
def test_controller_has_the_first_cores_of_each_node(
    nodes: Nodes, rank_nodes: list[int | None], ranks: list[tuple[int, ...]], controller: tuple[int, ...]
) -> None:
    assert share_cores(nodes, rank_nodes) == Plan(ranks=tuple(ranks), controller=controller)


@pytest.mark.parametrize(
    ("nodes", "rank_nodes", "needs", "found"),
    [
        ({0: node(0, 1)}, [None], "1 rank and the controller need 3 cores", 2),
        ({0: node(0, 31), 1: node(32, 34)}, [1, 1], "2 ranks and the controller need 5 cores", 35),
        ({0: [(0, 1, 2, 3), (4, 5, 6, 7)]}, [None] * 2, "2 ranks and the controller need 5 cores", 8),
    ],
)
def test_too_few_cores_give_a_reason(
    nodes: Nodes, rank_nodes: list[int | None], needs: str, found: int
) -> None:
    plan = share_cores(nodes, rank_nodes)
    assert isinstance(plan, str)
    assert plan.startswith(f"not pinned: {needs}")
    assert plan.endswith(f", found {found}")


@st.composite
def machines(draw: st.DrawFn, threads: st.SearchStrategy[int]) -> tuple[Nodes, list[int | None]]:
    """Nodes of up to 9 physical cores with gaps in their numbers, and ranks' nodes, some of them
    unknown.
    """
    numbers = itertools.count()
    nodes = {
        number: [
            tuple(2 * next(numbers) for _ in range(draw(threads))) for _ in range(draw(st.integers(1, 9)))
        ]
        for number in draw(st.sampled_from([[0], [0, 1], [1, 3], [0, 1, 2]]))
    }
    return nodes, draw(st.lists(st.none() | st.sampled_from([0, 1, 3]), min_size=1, max_size=5))


@BOUNDED
@given(machines(threads=st.integers(1, 3)))
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
        places = {
            (number, i)
            for number, cpus in nodes.items()
            for i, cpu in enumerate(cpus)
            if set(cpu) & set(share)
        }
        assert len({number for number, _ in places}) == 1
        if home in nodes:
            assert {number for number, _ in places} == {home}
        indices = [index for _, index in places]
        assert max(indices) - min(indices) < len(indices), "contiguous"


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


def test_unknown_topology_is_one_node(tmp_path: Path) -> None:
    assert numa_nodes([3, 1], tmp_path) == {0: [(1,), (3,)]}


@pytest.mark.parametrize(
    ("address", "node"),
    [
        ("00000000:4B:00.0", 1),
        ("0000000A:4B:00.0", 2),
        ("00000000:5C:00.0", None),  # a virtual machine's kernel says -1
        ("00000000:6D:00.0", None),  # no such device
        ("", None),
    ],
)
def test_gpu_has_the_node_of_its_slot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, node: int | None
) -> None:
    for slot, told in {"0000:4b:00.0": "1", "000a:4b:00.0": "2", "0000:5c:00.0": "-1"}.items():
        (tmp_path / "sys/bus/pci/devices" / slot).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / slot / "numa_node").write_text(f"{told}\n")
    monkeypatch.setattr(hardware, "Path", lambda path: tmp_path / path.lstrip("/"))
    info = SimpleNamespace(busId=address)
    install(monkeypatch, [healthy(PciInfo=info, NumaNodeId=3)])  # 3: the node of the GPU's own memory
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = hardware.visible_gpus()
    assert gpu.numa_node == node
