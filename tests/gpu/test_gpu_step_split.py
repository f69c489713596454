"""A captured step on GPUs is split into its parts, its communication, and what the GPU waits for."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ddpperf.analysis.comm_split import longest_wait, traced
from ddpperf.data.augmentation import Batch
from ddpperf.data.inputs import TransformedImages
from ddpperf.specs import (
    EpochPartsSpec,
    Execution,
    PartsSpec,
    TraceSpec,
    TrainingSpec,
    measured_as,
    to_json,
)
from ddpperf.training import model_and_data
from ddpperf.workers.pool import Pool
from ddpperf.workers.rank_commands import Rank
from perf.test_step_breakdown import least_waiting_parts, parts_over_step
from tests.gpu.shared import ALONE, DDP, GPU, two_gpus
from tests.ranks.test_comm_split import ranks

DELAY_SECONDS = 2e-3
LARGE = replace(DDP, per_rank_batch_size=512, epoch_images=512 * 128)
LATE = replace(LARGE, comm_delay_seconds=DELAY_SECONDS, comm_delay_rank=1)


@two_gpus
def test_both_methods_find_the_late_rank(exact_gpus: Pool) -> None:
    """By difference to steps without communication, and by the trace; nearly the same without delay."""
    found = []
    for spec in (LARGE, LATE):
        (sample,) = exact_gpus.measure(measured_as(TraceSpec, spec)).samples
        steps, alone = (ranks(exact_gpus.measure_once(one)) for one in (spec, spec.no_sync()))
        by_trace = sample.counters["exposed_comm_seconds"]
        found.append((longest_wait(steps, alone), max(by_trace)))
        if spec == LARGE:
            exposed = traced(sample.counters)["traced_exposed_comm_seconds"]
            assert longest_wait(steps, alone) == pytest.approx(exposed, abs=0.05 * max(steps))
    assert [late - before for before, late in zip(*found, strict=True)] == pytest.approx(
        [DELAY_SECONDS] * 2, rel=0.1
    )
    assert by_trace.index(max(by_trace)) == 0, "the rank that waits most is the other one"
    silent = ranks(exact_gpus.measure_once(LATE.local()))
    assert silent.index(max(silent)) == 1


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(replace(ALONE, per_rank_batch_size=512, epoch_images=512 * 128), id="single"),
        pytest.param(LARGE, marks=two_gpus, id="ddp"),
    ],
)
def test_parts_sum_to_their_step_and_to_one_without_marks(exact_gpus: Pool, spec: TrainingSpec) -> None:
    """Not with batch size 32 on one GPU: its pace may change in between (docs/limits.md)."""
    measured = exact_gpus.measure(measured_as(PartsSpec, spec))
    (sample,) = measured.samples
    (found,) = least_waiting_parts(measured).values()
    assert all(seconds > 0 for seconds in found.values())
    assert parts_over_step(measured, sample) == pytest.approx(1, rel=0.02)
    unmarked = max(ranks(exact_gpus.measure_once(spec))[: spec.world_size])
    assert sum(found.values()) == pytest.approx(unmarked, rel=0.02)


@two_gpus
@pytest.mark.slow
def test_a_late_message_counts_as_gradient_sync(exact_gpus: Pool) -> None:
    measured = (exact_gpus.measure(measured_as(PartsSpec, spec)) for spec in (LARGE, LATE))
    before, after = (next(iter(least_waiting_parts(each).values())) for each in measured)
    assert after["gradient_sync"] - before["gradient_sync"] == pytest.approx(DELAY_SECONDS, rel=0.1)
    for part in ("data", "forward", "backward", "optimizer"):
        assert after[part] == pytest.approx(before[part], rel=0.1, abs=1e-4)


# --- epochs with a DataLoader

STEPS = 8
IMAGES_PER_STEP = 16
IMAGE_SECONDS = 0.004  # in which the slow data set yields an image
SLOW = EpochPartsSpec(
    world_size=1,
    per_rank_batch_size=IMAGES_PER_STEP,
    strategy="single",
    model="resnet18_cifar",
    input="dataloader",
    epoch_images=IMAGES_PER_STEP * STEPS,
    execution="graph",
)


@pytest.mark.parametrize(
    ("spec", "workers", "execution"),
    [
        pytest.param(ALONE, 0, "eager", marks=pytest.mark.slow),
        pytest.param(DDP, 4, "graph", marks=two_gpus),
    ],
    ids=["single", "ddp"],
)
def test_parts_add_up_to_an_epoch(gpus: Pool, spec: TrainingSpec, workers: int, execution: Execution) -> None:
    plain = replace(spec, per_rank_batch_size=128, epoch_images=128 * 40, execution=execution)
    epoch = measured_as(EpochPartsSpec, plain)
    measured = gpus.measure(replace(epoch, input="dataloader", loader_workers=workers))
    (sample,) = measured.samples
    assert parts_over_step(measured, sample) == pytest.approx(1, rel=0.02)
    (found,) = least_waiting_parts(measured).values()
    assert all(seconds > 0 for seconds in found.values())


class Slow(nn.Module):
    """A model on which the GPU computes for about 0.1 s."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * 32 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        torch.cuda._sleep(180_000_000)
        logits: Tensor = self.linear(images.flatten(1))
        return logits


def counted(spec: EpochPartsSpec) -> tuple[dict[str, float], float]:
    """Return the counters of an epoch in this process, and the seconds of an epoch."""
    rank = Rank(0)
    rank.device = GPU
    before = torch.cuda.current_stream()
    rank.open(to_json(spec))
    seconds = rank.sample(1)["seconds"]
    counters = rank.finish()["counters"]
    rank.close()
    torch.cuda.set_stream(before)
    return counters, seconds


@pytest.mark.parametrize("slow_model", [False, True])
def test_loading_is_what_the_gpu_waits_for(monkeypatch: pytest.MonkeyPatch, slow_model: bool) -> None:
    """Behind a slow model, the GPU waits for an epoch's first batch only."""
    read = TransformedImages.__getitem__

    def slow(images: TransformedImages, index: int) -> Batch:
        time.sleep(IMAGE_SECONDS)
        return read(images, index)

    monkeypatch.setattr(TransformedImages, "__getitem__", slow)
    if slow_model:
        monkeypatch.setattr(model_and_data, "build", lambda _: Slow())
    counters, epoch = counted(SLOW)
    a_batch = IMAGES_PER_STEP * IMAGE_SECONDS
    waits = 1 if slow_model else STEPS
    assert STEPS * counters["loading_seconds"] == pytest.approx(waits * a_batch, rel=0.3)
    if slow_model:
        assert counters["forward_seconds"] > a_batch
        parts = ("loading", "data", "forward", "backward", "optimizer")
        assert STEPS * sum(counters[f"{part}_seconds"] for part in parts) == pytest.approx(epoch, rel=0.02)
