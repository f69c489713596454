"""Communication of a captured step on GPUs: both methods find a late message."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddpperf.analysis.comm_split import longest_wait, traced
from ddpperf.results.samples import Sample
from ddpperf.specs import BucketReplaySpec, TraceSpec, TrainingSpec, measured_as
from ddpperf.workers.pool import Pool
from tests.gpu.test_gpu_kernels import SPEC as ALONE
from tests.ranks.test_comm_split import ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DELAY_SECONDS = 2e-3
FASTEST = {"comm_hook": "avg", "gradient_as_bucket_view": True, "buffer_sync": False}
SPEC = replace(ALONE, world_size=2, strategy="ddp", **FASTEST)  # type: ignore[arg-type]


def methods(pool: Pool, spec: TrainingSpec) -> tuple[float, float, list[float], Sample]:
    """Return exposed communication and bucket copies by difference, the silent step by rank, the traces."""
    (sample,) = pool.measure(measured_as(TraceSpec, spec)).samples
    steps, alone, local = (ranks(pool.measure_once(each)) for each in (spec, spec.no_sync(), spec.local()))
    return longest_wait(steps, alone), longest_wait(local, alone), local, sample


@pytest.mark.parametrize("late_rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_both_methods_find_the_late_rank(exact_gpus: Pool, late_rank: int) -> None:
    spec = replace(SPEC, per_rank_batch_size=512, epoch_images=512 * 128)
    late = replace(spec, comm_delay_seconds=DELAY_SECONDS, comm_delay_rank=late_rank)
    exposed, _, _, trace = methods(exact_gpus, spec)
    late_exposed, _, local, late_trace = methods(exact_gpus, late)
    assert late_exposed - exposed == pytest.approx(DELAY_SECONDS, rel=0.1)
    before, after = (found.counters["exposed_comm_seconds"] for found in (trace, late_trace))
    assert max(after) - max(before) == pytest.approx(DELAY_SECONDS, rel=0.1)
    assert local.index(max(local)) == late_rank
    assert after.index(max(after)) == 1 - late_rank, "the rank that waits most is the other one"


@pytest.mark.parametrize("batch_size", [128, pytest.param(512, marks=pytest.mark.slow)])
def test_the_methods_agree_on_a_captured_step(exact_gpus: Pool, batch_size: int) -> None:
    """With batch size 128 DDP's bucket copies are 3.4% of the step."""
    spec = replace(SPEC, per_rank_batch_size=batch_size, epoch_images=batch_size * 128)
    exposed, bucket_copies, _, trace = methods(exact_gpus, spec)
    step = max(ranks(exact_gpus.measure_once(spec)))
    replay = max(ranks(exact_gpus.measure(measured_as(BucketReplaySpec, spec))))
    named = bucket_copies if batch_size == 128 else 0.0
    found = traced(trace.counters)
    assert exposed - named == pytest.approx(found["traced_exposed_comm_seconds"], abs=0.05 * step)
    assert 0.5 * replay < found["traced_comm_seconds"] < 3 * replay, (
        "beside what is computed messages are slower, and the last may wait"
    )
