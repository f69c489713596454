"""Epochs and slow steps on real process sets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from ddpperf.results.samples import Measured
from ddpperf.specs import (
    FUNCTIONS_VARIABLE,
    PARTS,
    AllReduceSpec,
    EpochPartsSpec,
    EpochSpec,
    Spec,
)
from ddpperf.workers.failures import Cause, SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import WHOLE_SECONDS, Pool
from ddpperf.workers.process_set import ProcessSet, SetOptions
from perf.test_step_breakdown import parts_of, parts_over_step
from tests.project import Marked, wait_until

DEADLINE_SECONDS = 2.0
SMALL = AllReduceSpec(world_size=2, nbytes=1024)

# Every step takes 30 ms. With batches of 3 images, the second rank hangs in the middle of an epoch.
SLOW = """
import os, time
import torch

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.steps = 0

    def forward(self, inputs):
        time.sleep(0.03)
        self.steps += 1
        if len(inputs) == 3 and os.environ["RANK"] == "1" and self.steps > 60:
            time.sleep(600)
        return self.linear(inputs)

def model():
    return Slow(), lambda size: (torch.randn(size, 4), torch.randn(size, 1)), torch.nn.functional.mse_loss
"""


class Told:
    """What a pool says while it measures: the fractions that are done, and the rounds."""

    def __init__(self) -> None:
        self.progress: list[tuple[Spec, float]] = []
        self.rounds: list[int] = []

    def check_round(self, processes: list[int], done: int) -> str:
        self.rounds.append(done)
        return ""


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def pool(marked: Marked, told: Told, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "slow_model.py").write_text(SLOW)
    side = Side(environment={"PYTHONPATH": str(folder), FUNCTIONS_VARIABLE: "slow_model:model"})
    options = SetOptions(size=2, device="cpu", rounds=2, deadline_seconds=60, hang_folder=folder)

    def progress(spec: Spec, fraction: float) -> None:
        told.progress.append((spec, fraction))

    with Pool(options, sides=(side,), progress=progress, check_round=told.check_round) as pool:
        yield pool
    marked.assert_nothing_left()


def measured_and_counted(pool: Pool, spec: Spec) -> Measured:
    before = pool.counted_seconds
    start = time.monotonic()
    measured = pool.measure(spec)
    assert 0 < measured.counted_seconds() <= time.monotonic() - start
    assert pool.counted_seconds - before == pytest.approx(measured.counted_seconds())
    return measured


NEEDS_TORCHVISION = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="a dataloader's transforms are torchvision's"
)


@NEEDS_TORCHVISION
@pytest.mark.slow
def test_an_epoch_is_measured_on_two_ranks(pool: Pool, marked: Marked) -> None:
    spec = EpochSpec(
        model="resnet10_cifar",
        world_size=2,
        per_rank_batch_size=2,
        strategy="ddp",
        input="dataloader",
        loader_workers=1,
        epoch_images=8,
    )
    measured = measured_and_counted(pool, spec)
    (sample,) = measured.samples
    assert measured.iterations == 1
    assert [len(ranks) for ranks in sample.seconds] == [2, 2]
    assert measured.counted_seconds() == pytest.approx(sum(map(max, sample.seconds)))
    assert len(set(sample.counters["loss_after_5_steps"])) == 2, "each rank has images of its own"
    wait_until(lambda: len(loading(marked)) <= 2, 2, lambda: f"still loading: {loading(marked)}")


@pytest.mark.slow
@NEEDS_TORCHVISION
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 1)])
def test_parts_of_an_epoch_add_up(pool: Pool, world_size: int, workers: int) -> None:
    spec = EpochPartsSpec(
        model="resnet10_cifar",
        world_size=world_size,
        per_rank_batch_size=4,
        strategy="single" if world_size == 1 else "ddp",
        input="dataloader",
        loader_workers=workers,
        epoch_images=16 * world_size,
    )
    measured = pool.measure(spec)
    (sample,) = measured.samples
    assert parts_over_step(measured, sample) == pytest.approx(1, abs=0.02)
    for rank in range(world_size):
        parts = parts_of(sample, rank)
        assert set(parts) == set(PARTS) - ({"gradient_sync"} if world_size == 1 else set())
        assert all(seconds > 0 for seconds in parts.values())


def loading(marked: Marked) -> list[str]:
    """The processes of the fork servers: one a rank, and those that load."""
    return [command for command in marked.processes().values() if "forkserver" in command]


def slow_epoch(batch: int) -> EpochSpec:
    return EpochSpec(
        model="slow_model:model",
        world_size=2,
        per_rank_batch_size=batch,
        strategy="ddp",
        epoch_images=2 * batch * 140,
    )


def impatient_set(pool: Pool, told: Told, monkeypatch: pytest.MonkeyPatch) -> ProcessSet:
    """The pool's one set, which has imported and joined what takes its time, with a short deadline."""
    pool.measure(dataclasses.replace(slow_epoch(batch=1), epoch_images=2))
    (live,) = pool.live_sets()
    impatient = dataclasses.replace(live.options, deadline_seconds=DEADLINE_SECONDS)
    monkeypatch.setattr(live, "options", impatient)
    told.progress.clear()
    told.rounds.clear()
    return live


@pytest.mark.slow
def test_long_epoch_that_reports_is_no_hang(pool: Pool, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, live = slow_epoch(batch=2), impatient_set(pool, told, monkeypatch)
    measured = measured_and_counted(pool, spec)
    assert pool.live_sets() == [live]
    assert measured.counted_seconds() > max(2 * DEADLINE_SECONDS, WHOLE_SECONDS)
    assert len(measured.all_step_seconds()) == 1, "it took longer than what is long is repeated"
    assert told.rounds == [0, 1]
    assert {each for each, _ in told.progress} == {spec}
    fractions = sorted({fraction for _, fraction in told.progress if 0 < fraction < 1})
    assert len(fractions) >= 3
    assert fractions[0] < 0.5 < fractions[-1]


@pytest.mark.slow
def test_rank_that_stops_after_reports_is_a_hang(
    pool: Pool, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, start = impatient_set(pool, told, monkeypatch), time.monotonic()
    hang = r"ranks 0, 1 of set A1 did not answer within 2 s \(at \w+\)"
    with pytest.raises(SetFailure, match=hang) as caught:
        pool.measure(slow_epoch(batch=3))
    assert time.monotonic() - start < 20
    assert [fraction for _, fraction in told.progress if fraction], "it was alive at first"
    assert {failure.cause for failure in caught.value.failures} == {Cause.HUNG}
    assert not live.alive
