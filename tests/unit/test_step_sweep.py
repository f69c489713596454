"""Each instant of a traced step belongs to exactly one row, on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.measuring.trace_split import PART, STEP, STEP_BYTES, Event
from ddpperf.why.names import kernel
from ddpperf.why.sweep import BETWEEN, LAUNCHING, SENT, WAITS, Row, functions_of, steps_of, total, waiting

US = 1e-6
MAIN, OTHER = 1, 2  # threads


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: object) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def cpu_step(at: float, *inside: Event) -> list[Event]:
    """A step of 100 us with its events, whose times count from its begin."""
    return [
        event("user_annotation", STEP, at, 100),
        *({**one, "ts": at + one["ts"]} for one in inside),
    ]


def gpu_step(at: float, *works: Event) -> list[Event]:
    """A step whose mark, a copy of 2 us, ends at `at`; the times of the works count from there."""
    mark = event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", at - 2, 2, bytes=STEP_BYTES)
    return [mark, *({**one, "ts": at + one["ts"]} for one in works)]


def near(seconds: float) -> Any:
    return pytest.approx(seconds * US)


# --- on a CPU

FORWARD = [
    event("user_annotation", f"{PART}forward", 0, 60),
    event("cpu_op", "aten::conv2d", 10, 30),
    event("cpu_op", "aten::mkldnn_convolution", 15, 20),
    event("cpu_op", "ConvolutionBackward0", 45, 10),
    event("cpu_op", "autograd::engine::evaluate_function", 44, 12),
]
BACKWARD = [
    event("user_annotation", f"{PART}backward", 60, 30),
    event("user_annotation", "gloo:all_reduce", 55, 30, OTHER),
    event("cpu_op", "aten::mul", 70, 5),
]


def test_innermost_operators_have_the_time_of_a_step_on_a_cpu() -> None:
    first, rows = [cpu_step(0), cpu_step(1000, *FORWARD, *BACKWARD)]
    (found,) = steps_of(first + rows)
    assert found["operators", "forward", "aten::conv2d"] == Row(near(10), 1)
    assert found["operators", "forward", "aten::mkldnn_convolution"] == Row(near(20), 1)
    assert found["operators", "backward", "aten::mul"] == Row(near(5), 1)
    assert found[SENT, WAITS] == Row(near(5 + 10 + 10), 1), "less than its 30 us, as an operator ran beside"
    assert found[BETWEEN, "forward"].seconds == near(10 + 15)
    assert found[BETWEEN, "backward"].seconds == near(5)
    assert found[BETWEEN, ""].seconds == near(10)
    assert total(found) == near(100)
    assert waiting(found) == near(25)


def test_barriers_loaders_and_compiled_graphs_have_rows_of_their_own() -> None:
    inside = [
        event("cpu_op", "c10d::barrier", 0, 10),
        event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 20, 30),
        event("cpu_op", "aten::stack", 25, 10),
        event("cpu_op", "## Call CompiledFxGraph fabc ##", 60, 20),
    ]
    (found,) = steps_of(cpu_step(0) + cpu_step(500, *inside))
    assert found[SENT, "c10d::barrier"].seconds == near(10)
    assert found["loading", "DataLoader"].seconds == near(30)
    assert found["operators", "", "compiled graph"].seconds == near(20)


def test_an_operator_that_begins_at_the_end_of_two_others_has_its_time() -> None:
    inside = [
        event("cpu_op", "aten::outer", 0, 20),
        event("cpu_op", "aten::inner", 10, 10),
        event("cpu_op", "aten::next", 20, 30),
    ]
    (found,) = steps_of(cpu_step(0) + cpu_step(512, *inside))
    assert found["operators", "", "aten::next"].seconds == near(30)
    assert found[BETWEEN, ""].seconds == near(50)


def test_time_in_which_a_rank_waits_at_a_barrier_is_no_work_of_its_cpu() -> None:
    barrier = [
        event("cpu_op", "c10d::barrier", 10, 5),
        event("user_annotation", "gloo:barrier", 12, 40, OTHER),
    ]
    (found,) = steps_of(cpu_step(0) + cpu_step(500, *barrier))
    assert found[SENT, WAITS].seconds == near(37)
    assert waiting(found) == near(42)


def test_time_between_operators_is_that_of_python_functions() -> None:
    inside = [
        event("user_annotation", f"{PART}optimizer", 0, 100),
        event("python_function", "sgd.py(80): step", 0, 90),
        event("python_function", "mine.py(7): burn", 10, 50),
        event("python_function", "<built-in function sleep>", 20, 30),
        event("cpu_op", "aten::add_", 70, 10),
    ]
    found = functions_of(cpu_step(0) + cpu_step(500, *inside))
    assert found == {("optimizer", "sgd.py(80): step"): near(30), ("optimizer", "mine.py(7): burn"): near(50)}


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40), st.booleans()), max_size=12))
def test_rows_of_any_step_add_up(spans: list[tuple[int, int, bool]]) -> None:
    inside = [
        event("cpu_op", f"aten::op{number}", begin, length)
        if is_operator
        else event("user_annotation", "gloo:all_reduce", begin, length, OTHER)
        for number, (begin, length, is_operator) in enumerate(spans)
    ]
    (found,) = steps_of(cpu_step(0) + cpu_step(1000, *inside))
    assert total(found) == near(100)
    assert all(row.seconds >= 0 for row in found.values())


# --- on a GPU


def test_kernels_come_before_copies_and_communication_on_a_gpu() -> None:
    works = [
        event("kernel", "sm90_xmma_fprop_implicit_gemm_bf16bf16", 0, 40, correlation=7),
        event(
            "kernel",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
            20,
            50,
            correlation=7,
            grid=[4],
            block=[512],
        ),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 60, 20, correlation=7),
        event(
            "kernel", "void at::native::multi_tensor_apply_kernel<FusedSgdMathFunctor>", 90, 8, correlation=7
        ),
    ]
    launch = event("cuda_runtime", "cudaGraphLaunch", 0, 5, correlation=7)
    (found,) = steps_of([*gpu_step(100), *gpu_step(1000, *works), *gpu_step(1100), launch])
    assert found["kernels", "convolution", "convolution fprop bf16"] == Row(near(40), 1)
    sent = "nccl AllReduce Sum f32"
    assert found[SENT, sent, f"{sent}, 4 channels of 512 threads"] == Row(near(20), 1)
    assert found["copies", "Memcpy HtoD"] == Row(near(20), 1)
    assert found["kernels", "optimizer", "multi_tensor_apply_kernel FusedSgd"] == Row(near(8), 1)
    assert found["idle", "inside a CUDA graph"].seconds == near(10)
    assert total(found) == near(98)


def test_works_that_cross_a_mark_belong_to_both_steps() -> None:
    prefetch = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 80, 40)  # until 20 us after the mark
    marks = [*gpu_step(100), *gpu_step(1000, prefetch), *gpu_step(1100), *gpu_step(1200)]
    first, second = steps_of(marks)
    assert first["copies", "Memcpy HtoD"] == Row(near(18), 1)
    assert second["copies", "Memcpy HtoD"] == Row(near(20), 0)
    assert [total(first), total(second)] == [near(98), near(98)]


def test_idle_time_of_a_gpu_has_its_cause() -> None:
    kernels = [event("kernel", f"k{n}", 10 + 20 * n, 10, correlation=n) for n in range(3)]
    cpu = [
        event("user_annotation", f"{PART}backward", 1000, 29),
        event("cuda_runtime", "cudaLaunchKernel", 1003, 2, correlation=0),
        event("cuda_runtime", "cudaLaunchKernel", 1025, 2, correlation=1),
        event("cuda_runtime", "cudaStreamSynchronize", 1015, 30),
        event("cuda_runtime", "cudaLaunchKernel", 1046, 2, correlation=2),
    ]
    (found,) = steps_of([*gpu_step(100), *gpu_step(1000, *kernels), *gpu_step(1062), *cpu])
    assert found["idle", LAUNCHING, "backward"].seconds == near(20)
    assert found["idle", LAUNCHING, "backward"].calls == 2, "CPU events that begin while the GPU waits"
    assert found["idle", "after cudaStreamSynchronize, in which the CPU waits"].seconds == near(10)
    assert total(found) == near(60)


def test_gaps_of_a_gpu_that_is_behind_the_cpu_are_no_time_of_the_cpu() -> None:
    kernels = [event("kernel", f"k{n}", 30 * n, 28, correlation=n) for n in range(3)]
    cpu = [event("cuda_runtime", "cudaLaunchKernel", 900 + 5 * n, 3, correlation=n) for n in range(3)]
    (found,) = steps_of([*gpu_step(100), *gpu_step(1000, *kernels), *gpu_step(1090), *cpu])
    assert found["idle", "between kernels that the CPU has launched before"].seconds == near(4)


def test_trace_without_marks_has_no_steps() -> None:
    assert steps_of([event("cpu_op", "aten::mul", 0, 5), {"ph": "M", "name": "process_name"}]) == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "nccl AllReduce Sum bf16",
        ),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl Broadcast"),
        (
            "sm80_xmma_wgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16",
            "convolution wgrad tf32",
        ),
        (
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized>(x)",
            "convolution dgrad bf16",
        ),
        ("triton_poi_fused_add_native_batch_norm_relu_17", "triton add native batch norm relu"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
            "add",
        ),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::X)>(int)",
            "copy",
        ),
        (
            "void pointwise_mult_and_sum_complex<float2, 8, 4>(float2*)",
            "convolution f32",
        ),
        ("nvjet_hsh_128x64_64x6_1x2_h_bz_TNT", "matrix product"),
        (
            "void at::(anonymous namespace)::multi_tensor_apply_kernel<X, FusedSgdMathFunctor<float, 3>>(x)",
            "multi_tensor_apply_kernel FusedSgd",
        ),
    ],
)
def test_names_of_kernels_are_short_and_equal_for_equal_work(name: str, found: str) -> None:
    assert kernel(name)[1] == found
