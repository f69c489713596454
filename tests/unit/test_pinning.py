"""Pinning of ranks and controller, with a simulated kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddpperf.machine import cores
from ddpperf.machine.cores import Pinning
from ddpperf.machine.gpu_description import Gpu
from ddpperf.specs import EpochSpec, Strategy
from tests.fake_nvml import healthy

TWO_NODES = {0: [(core,) for core in range(8)], 1: [(core,) for core in range(8, 16)]}


def span(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel with 16 cores in two nodes, which grants this process all cores that it requests."""
    now = {0: set(range(16))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(now[process]))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, asked: now.update({process: set(asked)}))
    monkeypatch.setattr(cores, "core_count", lambda: 16)
    monkeypatch.setattr(cores, "numa_nodes", lambda _: TWO_NODES)
    yield
    assert now == {0: set(range(16))}, "given back"


def gpu(numa_node: int | None) -> Gpu:
    return replace(healthy().gpu, numa_node=numa_node)


@pytest.mark.usefixtures("sixteen")
def test_controller_is_off_the_ranks_until_released() -> None:
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
def test_crowded_cores_give_a_warning() -> None:
    pinning = Pinning()
    assert pinning.warnings(epoch(1, loader_workers=15)) == []
    assert pinning.warnings(epoch(1, loader_workers=16)) == ["17 processes share 16 cores"]
    pinning.plan(2, [])
    assert pinning.warnings(epoch(1, loader_workers=6)) == []
    assert pinning.warnings(epoch(1, loader_workers=7)) == ["8 processes share 7 cores"]
    assert pinning.warnings(epoch(2, loader_workers=6)) == []
    assert pinning.warnings(epoch(2, loader_workers=7)) == ["16 processes share 14 cores"]
    assert pinning.warnings(epoch(4, loader_workers=3)) == [], "4 ranks are not pinned to cores of 2"
    assert pinning.warnings(epoch(4, loader_workers=4)) == ["20 processes share 16 cores"]


@pytest.mark.usefixtures("sixteen")
def test_quota_prevents_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "core_count", lambda: 8)
    pinning = Pinning()
    pinning.plan(2, [])
    assert pinning.ranks is None
    assert pinning.environment() == {
        "pinning": "not pinned: the control group has a quota of 8 of 16 cores, and no particular ones"
    }
