"""Communication of a captured step on GPUs: both methods find a late message."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddpperf.analysis.comm_split import Difference, Traced, difference, traced
from ddpperf.specs import BucketReplaySpec, TraceSpec, TrainingSpec, measured_as
from ddpperf.workers.pool import Pool
from tests.gpu.test_gpu_kernels import SPEC as ALONE
from tests.ranks.test_comm_split import ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DELAY_SECONDS = 2e-3
FASTEST = {"comm_hook": "avg", "gradient_as_bucket_view": True, "buffer_sync": False}
SPEC = replace(ALONE, world_size=2, strategy="ddp", **FASTEST)  # type: ignore[arg-type]


def methods(pool: Pool, spec: TrainingSpec) -> tuple[Difference, Traced]:
    (sample,) = pool.measure(measured_as(TraceSpec, spec)).samples
    steps, alone, filled = (ranks(pool.measure_once(each)) for each in (spec, spec.no_sync(), spec.local()))
    b = traced(sample.counters["comm_seconds"], sample.counters["exposed_comm_seconds"])
    assert b is not None
    return difference(steps, alone, filled), b


@pytest.mark.parametrize("late_rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_both_methods_find_the_late_rank(exact_gpus: Pool, late_rank: int) -> None:
    spec = replace(SPEC, per_rank_batch_size=512, epoch_images=512 * 128)
    late = replace(spec, comm_delay_seconds=DELAY_SECONDS, comm_delay_rank=late_rank)
    (a, b), (late_a, late_b) = methods(exact_gpus, spec), methods(exact_gpus, late)
    assert late_a.exposed - a.exposed == pytest.approx(DELAY_SECONDS, rel=0.1)
    assert late_b.exposed - b.exposed == pytest.approx(DELAY_SECONDS, rel=0.1)
    assert late_a.late_rank == late_b.late_rank == late_rank


@pytest.mark.parametrize("batch_size", [128, pytest.param(512, marks=pytest.mark.slow)])
def test_the_methods_agree_on_a_captured_step(exact_gpus: Pool, batch_size: int) -> None:
    """With batch size 128 DDP's bucket copies are 3.4% of the step."""
    spec = replace(SPEC, per_rank_batch_size=batch_size, epoch_images=batch_size * 128)
    a, b = methods(exact_gpus, spec)
    step = max(ranks(exact_gpus.measure_once(spec)))
    replay = max(ranks(exact_gpus.measure(measured_as(BucketReplaySpec, spec))))
    named = a.bucket_copies if batch_size == 128 else 0.0
    assert a.exposed - named == pytest.approx(b.exposed, abs=0.05 * step)
    assert 0.5 * replay < b.total < 3 * replay, (
        "beside what is computed messages are slower, and the last may wait"
    )
