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
from ddpperf.results.samples import Sample
from ddpperf.specs import (
    BucketReplaySpec,
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


def methods(pool: Pool, spec: TrainingSpec) -> tuple[float, float, list[float], Sample]:
    """Return exposed communication and bucket copies by difference, the silent step by rank, the traces."""
    (sample,) = pool.measure(measured_as(TraceSpec, spec)).samples
    steps, alone, local = (ranks(pool.measure_once(each)) for each in (spec, spec.no_sync(), spec.local()))
    return longest_wait(steps, alone), longest_wait(local, alone), local, sample


@two_gpus
def test_both_methods_find_the_late_rank(exact_gpus: Pool) -> None:
    exposed, _, _, trace = methods(exact_gpus, LARGE)
    late_exposed, _, local, late_trace = methods(exact_gpus, LATE)
    assert late_exposed - exposed == pytest.approx(DELAY_SECONDS, rel=0.1)
    before, after = (found.counters["exposed_comm_seconds"] for found in (trace, late_trace))
    assert max(after) - max(before) == pytest.approx(DELAY_SECONDS, rel=0.1)
    assert local.index(max(local)) == 1
    assert after.index(max(after)) == 0, "the rank that waits most is the other one"


@two_gpus
@pytest.mark.slow
def test_the_methods_agree_on_a_captured_step(exact_gpus: Pool) -> None:
    """With batch size 128 DDP's bucket copies are 3.4% of the step."""
    spec = replace(DDP, per_rank_batch_size=128, epoch_images=128 * 128)
    exposed, bucket_copies, _, trace = methods(exact_gpus, spec)
    step = max(ranks(exact_gpus.measure_once(spec)))
    replay = max(ranks(exact_gpus.measure(measured_as(BucketReplaySpec, spec))))
    found = traced(trace.counters)
    assert exposed - bucket_copies == pytest.approx(found["traced_exposed_comm_seconds"], abs=0.05 * step)
    assert 0.5 * replay < found["traced_comm_seconds"] < 3 * replay, (
        "beside what is computed messages are slower, and the last may wait"
    )


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
    [(ALONE, 0, "eager"), pytest.param(DDP, 4, "graph", marks=two_gpus)],
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
