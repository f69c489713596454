"""Utilization and energy while real ranks train: what is stored."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading

import pytest

from ddpperf.plugin.device_guard import Devices
from ddpperf.results.samples import Measured, Usage
from ddpperf.specs import AllReduceSpec, EpochSpec, RunSpec, Spec, TrainingSpec
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool

STEP = TrainingSpec(world_size=2, per_rank_batch_size=8, model="resnet10_cifar", strategy="ddp")
EPOCH = EpochSpec(
    world_size=1, per_rank_batch_size=8, model="resnet10_cifar", strategy="single", epoch_images=64
)
RUN = RunSpec(
    world_size=2,
    strategy="ddp",
    per_rank_batch_size=16,
    model="resnet10_cifar",
    input="device",
    epoch_images=256,
    test_images=64,
    epochs=2,
    rate=0.01,
)


@pytest.fixture
def recorded(two_ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """The shared ranks, whose devices are recorded in this test."""
    monkeypatch.setattr(two_ranks, "_recorder", Devices((), 2).recorder)
    return two_ranks


def usage_of(pool: Pool, spec: Spec) -> Usage | None:
    measured = pool.measure(spec)
    assert Measured.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    return measured.samples[0].usage


def samplers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ddpperf-sampler"]


@pytest.mark.slow
def test_trainings_are_sampled_and_steps_are_not(recorded: Pool) -> None:
    run, epoch = (dataclasses.replace(spec, delay_seconds=0.05) for spec in (RUN, EPOCH))  # 0.8 s and 0.4 s
    usage = usage_of(recorded, run)
    assert usage is not None
    assert len(usage.seconds) >= 2
    assert usage.seconds[0] >= 0.1
    assert {name: len(rows) for name, rows in usage.series.items()} == {
        "cpu_utilization": 1,
        "rank_cpus": 2,
        "rank_memory_bytes": 2,
    }
    of_epoch = usage_of(recorded, epoch)
    assert of_epoch is not None
    assert len(of_epoch.series["rank_cpus"]) == 1  # the second rank waits
    for spec in (STEP, AllReduceSpec(world_size=2, nbytes=1024)):
        found = usage_of(recorded, spec)
        assert found is None or not found.series
    assert not samplers()


def test_rank_that_fails_leaves_no_sampler(recorded: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(processes: list[int], done: int) -> str:
        os.kill(processes[1], signal.SIGKILL)
        return ""

    monkeypatch.setattr(recorded, "_check_round", kill)
    with pytest.raises(SetFailure, match="at sample"):
        recorded.measure(RUN)
    assert not samplers()
