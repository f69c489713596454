"""The parts of a captured step on GPUs add up to the step, and loading is what the GPU waits for."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ddpperf.analysis.batch_size import loading_fraction
from ddpperf.data.augmentation import Batch
from ddpperf.data.inputs import TransformedImages
from ddpperf.specs import EpochPartsSpec, Execution, PartsSpec, TrainingSpec, measured_as, to_json
from ddpperf.training import model_and_data
from ddpperf.workers.pool import Pool
from ddpperf.workers.rank_commands import Rank
from perf.test_step_breakdown import least_waiting_parts, parts_over_step
from tests.gpu.test_gpu_comm_split import DELAY_SECONDS, SPEC
from tests.gpu.test_gpu_kernels import SPEC as ALONE
from tests.ranks.test_comm_split import ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def parts(pool: Pool, spec: TrainingSpec) -> dict[str, float]:
    (found,) = least_waiting_parts(pool.measure(measured_as(PartsSpec, spec))).values()
    return found


@pytest.mark.parametrize(
    ("spec", "batch_size"),
    [
        pytest.param(ALONE, 512, id="single-512"),
        pytest.param(SPEC, 32, marks=[two_gpus, pytest.mark.slow], id="ddp-32"),
        pytest.param(SPEC, 512, marks=two_gpus, id="ddp-512"),
    ],
)
def test_parts_sum_to_their_step_and_to_one_without_marks(
    exact_gpus: Pool, spec: TrainingSpec, batch_size: int
) -> None:
    """Not with one GPU and batch size 32: its pace may change in between (docs/limits.md)."""
    spec = replace(spec, per_rank_batch_size=batch_size, epoch_images=batch_size * 128)
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
    spec = replace(SPEC, per_rank_batch_size=512, epoch_images=512 * 128)
    late = replace(spec, comm_delay_seconds=DELAY_SECONDS, comm_delay_rank=1)
    before, after = parts(exact_gpus, spec), parts(exact_gpus, late)
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
)


@pytest.mark.parametrize(
    ("spec", "workers", "execution"),
    [(ALONE, 0, "eager"), pytest.param(SPEC, 4, "graph", marks=two_gpus)],
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


@pytest.fixture
def slow_images(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make the data set slow, and return the seconds that each image took."""
    taken: list[float] = []
    read = TransformedImages.__getitem__

    def slow(images: TransformedImages, index: int) -> Batch:
        began = time.perf_counter()
        time.sleep(IMAGE_SECONDS)
        image = read(images, index)
        taken.append(time.perf_counter() - began)
        return image

    monkeypatch.setattr(TransformedImages, "__getitem__", slow)
    return taken


def counted(spec: EpochPartsSpec) -> tuple[dict[str, float], float]:
    """Return the counters of an epoch in this process, and the seconds of an epoch."""
    rank = Rank(0)
    rank.device = torch.device("cuda", 0)
    before = torch.cuda.current_stream()
    rank.open(to_json(spec))
    seconds = rank.sample(1)["seconds"]
    counters = rank.finish()["counters"]
    rank.close()
    torch.cuda.set_stream(before)
    return counters, seconds


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_slow_data_set_is_found_in_loading(slow_images: list[float], execution: Execution) -> None:
    counters, epoch = counted(replace(SLOW, execution=execution))
    a_batch = sum(slow_images[-IMAGES_PER_STEP * STEPS :]) / STEPS
    assert counters["loading_seconds"] == pytest.approx(a_batch, rel=0.1)
    assert counters["loading_wait_seconds"] == pytest.approx(a_batch, rel=0.1)
    _, alone = counted(replace(SLOW, input="fixed", execution=execution))
    by_parts = STEPS * counters["loading_seconds"] / epoch
    assert by_parts == pytest.approx(loading_fraction(epoch, alone), abs=0.05)


@pytest.mark.usefixtures("slow_images")
def test_loading_hides_behind_a_slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU waits for an epoch's first batch only. The CPU waits for all."""
    monkeypatch.setattr(model_and_data, "build", lambda _: Slow())
    counters, epoch = counted(replace(SLOW, execution="graph"))
    a_batch = IMAGES_PER_STEP * IMAGE_SECONDS
    assert counters["loading_wait_seconds"] > a_batch
    assert STEPS * counters["loading_seconds"] == pytest.approx(a_batch, rel=0.3)
    assert counters["forward_seconds"] > a_batch
    parts = ("loading", "data", "forward", "backward", "optimizer")
    total = sum(counters[f"{part}_seconds"] for part in parts)
    assert STEPS * total == pytest.approx(epoch, rel=0.02)
