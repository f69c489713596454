"""Traces: how time is split, and which files are refused."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpperf.instruments import step_trace, traced_steps
from ddpperf.instruments.traced_steps import TracedSteps, sending_seconds
from ddpperf.measuring.trace_split import MARK, messages_of, split_of, trace_of

TRACES = Path(__file__).parents[1] / "traces"
CPU = torch.device("cpu")
SUM = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>(Params)"


def event(name: str, begin: float, lasted: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": lasted}


def parts(found: dict[str, float], *names: str) -> list[float]:
    """Return parts of a split in microseconds."""
    return [found[f"{name}_seconds"] * 1e6 for name in names]


def test_a_gpus_time_is_split() -> None:
    """Of 100 us 50 compute, 40 communicate (10 of them during computation), 10 copy, 10 are idle."""
    found = split_of(
        [
            event(GEMM, 1000, 50),
            event(GEMM, 1010, 20),  # on another stream
            event(SUM, 1040, 40),
            event("Memcpy DtoD (Device -> Device)", 1090, 10, "gpu_memcpy"),
            event("cudaLaunchKernel", 900, 5, "cuda_runtime"),
            event("aten::mm", 900, 500, "cpu_op"),
        ]
    )
    assert parts(found, "traced_step", "compute", "comm", "exposed_comm", "copy", "idle") == pytest.approx(
        [100, 50, 40, 30, 10, 10]
    )


@pytest.mark.parametrize(
    ("name", "communicates"),
    [
        (SUM, True),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", True),
        ("void one_shot_all_reduce_kernel<float, 16>(float**)", True),
        ("void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 4>", True),
        ("low_latency_all_reduce", True),
        ("void multimem_all_reduce_kernel<float>", True),
        (GEMM, False),
        ("void at::native::reduce_kernel<512, 1>(ReduceOp)", False),
    ],
)
def test_communication_kernels_are_recognized_by_name(name: str, communicates: bool) -> None:
    found = split_of([event(name, 0, 10)])
    assert parts(found, "comm", "compute") == ([10, 0] if communicates else [0, 10])


def test_an_added_delay_is_idle_time() -> None:
    found = split_of([event(GEMM, 0, 10), event("at::cuda::spin_kernel(long)", 10, 30), event(SUM, 40, 10)])
    assert parts(found, "compute", "comm", "idle") == pytest.approx([10, 10, 30])


def test_the_ranks_barrier_is_left_out() -> None:
    events = [event(GEMM, 0, 1), event(SUM, 2, 500), event(GEMM, 510, 10), event(SUM, 515, 10)]
    found = split_of(events, met=True)
    assert parts(found, "traced_step", "comm", "exposed_comm") == pytest.approx([15, 10, 5])


def test_a_cpus_time_is_the_marked_range() -> None:
    found = split_of(
        [
            event("gloo:barrier", 0, 90, "user_annotation"),
            event(MARK, 100, 100, "user_annotation"),
            event("aten::conv2d", 110, 40, "cpu_op"),
            event("aten::mkldnn_convolution", 112, 30, "cpu_op"),
            event("c10d::allreduce_", 140, 50, "cpu_op"),
            event("gloo:all_reduce", 140, 50, "user_annotation"),
            event("aten::conv2d", 250, 40, "cpu_op"),
        ]
    )
    assert parts(found, "traced_step", "compute", "comm", "exposed_comm", "idle") == pytest.approx(
        [100, 40, 50, 40, 20]
    )


@pytest.mark.parametrize(("rank", "theirs"), [(0, 31.02), (1, 40.84)])
def test_a_captured_steps_overlap_equals_htas(rank: int, theirs: float) -> None:
    """The trace is of two H200s with batch size 512. HolisticTraceAnalysis 0.5 gave these percentages.

    The files hold the kernels and copies of the trace, in microseconds from the first one.
    """
    trace = lzma.decompress((TRACES / f"h200x2-graph-512-rank{rank}.json.xz").read_bytes())
    found, later = (split_of(json.loads(trace)["traceEvents"], met=met) for met in (False, True))
    exposed, sending = parts(found, "exposed_comm", "comm")
    assert 100 * (1 - exposed / sending) == pytest.approx(theirs, abs=0.005)
    assert later["comm_seconds"] < found["comm_seconds"], "where the ranks met is no part of the step"


def test_a_profile_begins_and_ends_with_an_idle_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trace would lack kernels that still run when the profile ends."""
    done: list[str] = []
    monkeypatch.setattr("ddpperf.measuring.clock.synchronize", lambda device: done.append("synchronized"))
    monkeypatch.setattr(torch.profiler.profile, "start", lambda profiler: done.append("started"))
    monkeypatch.setattr(torch.profiler.profile, "stop", lambda profiler: done.append("stopped"))
    trace_of(lambda: done.append("worked"), CPU, meet=lambda: done.append("met"))
    assert done == ["synchronized", "started", "met", "worked", "synchronized", "stopped"]


def test_counters_are_medians_of_one_step() -> None:
    traces = [{"comm_seconds": seconds} for seconds in (5.0, 90.0, 10.0)]
    assert TracedSteps.finish(SimpleNamespace(traced=traces)) == {"comm_seconds": 2.0}  # type: ignore[arg-type]


def test_a_message_takes_as_long_as_on_the_rank_that_comes_last() -> None:
    """Rank 1 is late for the all_reduce, rank 0 for the broadcast. The ranks' barrier is no message."""
    broadcast = "ncclDevKernel_Broadcast_RING_LL"
    first = [event(SUM, 0, 5), event(SUM, 10, 30), event(GEMM, 20, 5), event(broadcast, 50, 2)]
    second = [event(SUM, 1, 4), event(broadcast, 45, 7), event(GEMM, 10, 8), event(SUM, 30, 10)]
    found = sending_seconds([messages_of(events, met=True) for events in (first, second)])
    assert parts(found, "comm_without_waiting", "all_reduce_without_waiting") == pytest.approx([12, 10])
    assert sending_seconds([messages_of(first), messages_of(second, met=True)]) == {}, "one is missing"


def test_ranks_meet_before_each_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank's trace would begin with its wait for a later rank."""
    meetings: list[object] = []

    def traced(*_: object, meet: object, **how: object) -> list[object]:
        meetings.append(meet)
        return []

    monkeypatch.setattr(traced_steps, "trace_of", traced)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda ranks, mine: ranks.__setitem__(slice(None), [mine] * 2)
    )
    for grouped in (False, True):
        spec = SimpleNamespace(grouped=grouped, strategy="", world_size=2)
        training: Any = SimpleNamespace(training=SimpleNamespace(device=CPU, spec=spec))
        TracedSteps(training).step()
    assert meetings == [None, dist.barrier]


def test_a_trace_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    steps: list[int] = []
    lost = tmp_path / "none" / "trace.json"
    problem = step_trace.traced(lambda: steps.append(1), 2, CPU, lost, None, stacks=False)
    assert problem.startswith("torch's profiler fails (FileNotFoundError")
    assert len(steps) == 3
