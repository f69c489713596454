"""Faults of ranks at random moments of a measurement: the cause in time, and a right next measurement."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ddpperf.specs import EpochSpec, Spec, TrainingSpec
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.project import Marked

AT_ONCE = 3.0  # seconds until a death is reported, on a busy machine
FAULTS = {signal.SIGKILL: "was killed by SIGKILL", signal.SIGSEGV: "was killed by SIGSEGV"}
MODEL: dict[str, Any] = {"world_size": 2, "strategy": "ddp", "per_rank_batch_size": 4}
STEP = TrainingSpec(**MODEL, model="resnet10_cifar")
LOADER = EpochSpec(**MODEL, model="resnet10_cifar", input="dataloader", loader_workers=1, epoch_images=32)
MOMENTS = ("setup", "join", "open", "sample", "finish", "close")


@pytest.fixture(scope="module")
def pool(marked: Marked) -> Iterator[Pool]:
    options = SetOptions(size=2, device="cpu", rounds=4, deadline_seconds=60)
    with Pool(options) as pool:
        yield pool
    marked.assert_nothing_left()


def measure_again(pool: Pool, spec: Spec) -> None:
    """Measure until a fault is noticed, which can come after the last command."""
    for _ in range(3):
        pool.measure(spec)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_fault_at_a_random_moment_is_named_in_time(
    pool: Pool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed chooses the fault, the rank, the command that it follows, and how soon."""
    chance = random.Random(seed)
    number, cause = chance.choice([*FAULTS.items()])
    spec: Spec = chance.choice((STEP, LOADER))
    moment, delay, rank = chance.choice(MOMENTS), chance.uniform(0, 0.1), chance.choice((0, 1))
    happened: list[float] = []
    ask = ProcessSet.ask

    def watched(live: ProcessSet, command: str, **arguments: Any) -> None:
        ask(live, command, **arguments)
        if command == moment and not happened:
            happened.append(time.monotonic() + delay)
            threading.Timer(delay, os.kill, [live.pids[rank], number]).start()

    if moment in ("setup", "join"):
        pool.close()
    monkeypatch.setattr(ProcessSet, "ask", watched)
    with pytest.raises(SetFailure, match=rf"set \S+ {cause}") as caught:
        measure_again(pool, spec)
    if moment != "setup":
        assert time.monotonic() - happened[0] < AT_ONCE, (moment, delay, str(caught.value))
    monkeypatch.undo()
    (sample,) = pool.measure(STEP).samples
    assert all(seconds > 0 for round_seconds in sample.seconds for seconds in round_seconds)


@pytest.mark.slow
def test_many_measurements_leave_nothing_behind(pool: Pool) -> None:
    """Neither open files nor threads nor much memory, in ranks or in this process."""

    def usage() -> list[int]:
        processes = ["self", *map(str, pool.live_sets()[0].pids.values())]
        return [len(os.listdir(f"/proc/{one}/{kind}")) for one in processes for kind in ("fd", "task")]

    def measure(count: int) -> None:
        for _ in range(count):
            for spec in (STEP, LOADER, TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")):
                pool.measure(spec)

    measure(3)
    before = usage()
    measure(8)
    assert usage() == before
