"""Utilization while real ranks train: what a failure leaves."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ddpperf.plugin.device_guard import Devices
from ddpperf.specs import RunSpec
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool

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


def test_rank_that_fails_leaves_no_sampler(two_ranks: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(processes: list[int], done: int) -> str:
        os.kill(processes[1], signal.SIGKILL)
        return ""

    monkeypatch.setattr(two_ranks, "_recorder", Devices((), 2).recorder)
    monkeypatch.setattr(two_ranks, "_check_round", kill)
    with pytest.raises(SetFailure, match="at sample"):
        two_ranks.measure(RUN)
    assert "ddpperf-sampler" not in {thread.name for thread in threading.enumerate()}
