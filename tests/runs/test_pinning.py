"""Real ranks and the controller stay on the cores that they are given, and a run goes on where they cannot be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.machine import cores
from ddpperf.machine.cores import Pinning
from ddpperf.machine.hardware import Gpu, core_count
from ddpperf.specs import EpochSpec, Strategy
from ddpperf.workers.pool import Pool
from tests.project import Marked, Project

ALLOWED = os.sched_getaffinity(0)
TWO_NODES = {0: [(core,) for core in range(8)], 1: [(core,) for core in range(8, 16)]}


def span(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel with 16 cores in two nodes, which lets this process be on those that it asks for."""
    now = {0: set(range(16))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(now[process]))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, asked: now.update({process: set(asked)}))
    monkeypatch.setattr(cores, "core_count", lambda: 16)
    monkeypatch.setattr(cores, "numa_nodes", lambda _: TWO_NODES)
    yield
    assert now == {0: set(range(16))}, "given back"


def gpu(numa_node: int | None) -> Gpu:
    return Gpu(
        name="",
        uuid="",
        memory_bytes=None,
        power_limit_watts=None,
        nvlinks=None,
        nvlink_bytes_per_second=None,
        driver=None,
        numa_node=numa_node,
    )


@pytest.mark.usefixtures("sixteen")
def test_the_controller_is_held_off_the_ranks_until_it_is_released() -> None:
    pinning = Pinning()
    pinning.hold()
    assert pinning.ranks is None
    assert os.sched_getaffinity(0) == set(range(16)), "nothing is planned yet"
    pinning.plan(2, [gpu(1), gpu(None), gpu(1)])
    assert pinning.ranks == (span(9, 15), span(1, 7))
    assert os.sched_getaffinity(0) == set(range(16)), "ranks start on all cores"
    pinning.hold()
    assert os.sched_getaffinity(0) == {0, 8}
    assert pinning.environment() == {"pinning": {"controller": (0, 8), "ranks": (span(9, 15), span(1, 7))}}
    pinning.release()


def epoch(world_size: int, loader_workers: int) -> EpochSpec:
    strategy: Strategy = "single" if world_size == 1 else "ddp"
    return EpochSpec(
        world_size=world_size,
        per_rank_batch_size=2,
        strategy=strategy,
        input="dataloader",
        loader_workers=loader_workers,
    )


@pytest.mark.usefixtures("sixteen")
def test_processes_of_a_rank_crowd_its_own_cores() -> None:
    pinning = Pinning()
    assert pinning.warnings(epoch(1, loader_workers=15)) == []
    assert pinning.warnings(epoch(1, loader_workers=16)) == ["17 processes share 16 cores"]
    pinning.plan(2, [])
    assert pinning.warnings(epoch(1, loader_workers=6)) == []
    assert pinning.warnings(epoch(1, loader_workers=7)) == ["8 processes share 7 cores"]
    assert pinning.warnings(epoch(2, loader_workers=6)) == []
    assert pinning.warnings(epoch(2, loader_workers=7)) == ["16 processes share 14 cores"]


@pytest.mark.usefixtures("sixteen")
def test_a_quota_says_not_which_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "core_count", lambda: 8)
    pinning = Pinning()
    pinning.plan(2, [])
    assert pinning.ranks is None
    assert pinning.environment() == {
        "pinning": "not pinned: the control group has a quota of 8 of 16 cores, and no particular ones"
    }


@pytest.mark.parametrize(
    ("physical", "why"),
    [
        ([(core,) for core in span(5000, 5004)], "the kernel refuses the cores 5001, 5002: Invalid argument"),
        (
            [(5002,), (min(ALLOWED),), (5001,)],
            f"of the cores {min(ALLOWED)}, 5001 the kernel gives {min(ALLOWED)}",
        ),
    ],
)
def test_cores_that_the_kernel_refuses_leave_a_run_unpinned(
    monkeypatch: pytest.MonkeyPatch, physical: list[tuple[int, ...]], why: str
) -> None:
    monkeypatch.setattr(cores, "numa_nodes", lambda _: {0: physical})
    monkeypatch.setattr(cores, "core_count", lambda: len(ALLOWED))
    pinning = Pinning()
    pinning.plan(len(physical) // 2, [])
    assert pinning.environment() == {"pinning": f"not pinned: {why}"}
    assert pinning.ranks is None
    pinning.hold()
    assert os.sched_getaffinity(0) == ALLOWED


def cores_of(process: int) -> str:
    status = Path(f"/proc/{process}/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:"))


def test_a_rank_is_on_the_core_that_it_was_given(marked: Marked) -> None:
    core = max(ALLOWED)
    with Pool(size=1, device="cpu", rounds=2, deadline_seconds=60, cores=[[core]]) as pool:
        (live,) = pool.live_sets()
        assert cores_of(live.ranks[0].pid) == str(core)


PINNED = """
import os
from ddpperf.machine import cores
from ddpperf.specs import Fault, SamplerSpec

cores.MIN_CORES = 1  # so that two cores are enough

def test_one(measure):
    measure(SamplerSpec(world_size=1, epoch_images=10))
    (rank,) = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    print("CONTROLLER", sorted(os.sched_getaffinity(0)), "RANK", sorted(os.sched_getaffinity(int(rank))))

def test_fault(measure):
    measure(SamplerSpec(world_size=1, epoch_images=10, fault=Fault(kind="kill", rank=0, command="sample")))
"""

AFTERWARDS = """
def pytest_unconfigure():
    import os
    print("AFTERWARDS", sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(
    core_count() < len(ALLOWED) or len(ALLOWED) < 2, reason="needs two cores without a quota to be pinned"
)
def test_a_run_is_pinned_and_gives_the_controllers_cores_back_even_after_a_fault(project: Project) -> None:
    project.experiment.write_text(PINNED)
    with (project.root / "conftest.py").open("a") as conftest:
        conftest.write(AFTERWARDS)
    finished = project.run("perf", "--world-sizes", "1", "-s")
    assert finished.status == 1, finished
    (run,) = project.saved_runs()
    pinning = run["ddpperf"]["environment"]["pinning"]
    (rank,) = pinning["ranks"]
    assert {*pinning["controller"], *rank} == ALLOWED
    assert any(line.endswith(f"CONTROLLER {pinning['controller']} RANK {rank}") for line in finished.lines), (
        finished
    )
    assert f"AFTERWARDS {sorted(ALLOWED)}" in finished.lines, finished
    assert run["ddpperf"]["environment"]["cores"] == run["machine_info"]["cpu"]["count"] == len(ALLOWED)
