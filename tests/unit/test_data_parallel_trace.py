"""DataParallel's traces: kernels and copies of all GPUs belong to the part that launched them."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from torch.nn.parallel import _functions as of_torch

from ddpperf.instruments.data_parallel_trace import RANGE, RANGES, seconds_by_part
from ddpperf.specs import DATA_PARALLEL_PARTS

Event = dict[str, Any]
MAIN, BACKWARD = 1, 2  # threads
NODES = {"reduce": "BroadcastBackward", "scatter": "GatherBackward", "gather": "ScatterBackward"}


class Timeline:
    """A trace that is built event by event, in microseconds."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ids = count(1)

    def add(self, category: str, name: str, begin: float, lasted: float, thread: int, **ids: int) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": lasted, "tid": thread}
        self.events.append(event | {"args": {key.replace("_", " "): value for key, value in ids.items()}})

    def range(self, part: str, begin: float, lasted: float, thread: int = MAIN) -> None:
        is_forward = thread == MAIN
        category, name = ("user_annotation", RANGE + part) if is_forward else ("cpu_op", NODES[part])
        self.add(category, name, begin, lasted, thread)

    def work(
        self, launched: float, begin: float, lasted: float, *, thread: int = MAIN, category: str = "kernel"
    ) -> None:
        """Add a kernel or a copy with its launch."""
        number = next(self.ids)
        self.add("cuda_runtime", "cudaLaunchKernel", launched, 1, thread, correlation=number)
        self.add(category, "work", begin, lasted, 7, correlation=number, device=number % 2)

    def microseconds(self) -> dict[str, float]:
        return {name: value * 1e6 for name, value in seconds_by_part(self.events).items()}


def a_step() -> Timeline:
    """A step of 100 us: each part in the order of DataParallel, with one kernel of a forward pass."""
    step = Timeline()
    step.range("scatter", 0, 10)
    step.work(5, 10, 10, category="gpu_memcpy")
    step.range("replicate", 10, 20)
    step.work(12, 20, 10)
    step.work(14, 25, 15)  # on the other GPU, at the same time
    step.work(32, 35, 15, thread=9)  # a forward pass in a thread of its own
    step.range("gather", 50, 5)
    step.work(52, 60, 5, category="gpu_memcpy")
    step.range("scatter", 66, 3, BACKWARD)
    step.work(67, 70, 5, thread=BACKWARD, category="gpu_memcpy")
    step.work(70, 75, 15, thread=BACKWARD)  # a backward pass
    step.range("reduce", 80, 10, BACKWARD)
    step.work(82, 85, 20, thread=BACKWARD)
    step.work(92, 105, 5, category="gpu_memset")  # in the optimizer
    return step


def test_each_part_has_its_kernels_and_copies() -> None:
    found = a_step().microseconds()
    parts = {part: found[f"{part}_seconds"] for part in DATA_PARALLEL_PARTS}
    assert parts == pytest.approx({"scatter": 15, "replicate": 20, "gather": 5, "reduce": 20})
    assert found["unassigned_operations"] == 0


def test_communication_is_exposed_while_no_gpu_computes() -> None:
    found = a_step().microseconds()
    names = ("traced_step", "comm", "exposed_comm", "compute", "copy", "idle")
    durations = [found[f"{name}_seconds"] for name in names]
    assert durations == pytest.approx([100, 60, 50, 30, 5, 15])


def test_idle_gpus_count_while_the_cpu_launches_a_part() -> None:
    """From 50 to 55 the CPU gathers, and from 66 to 69 it scatters, while no GPU works."""
    assert a_step().microseconds()["idle_in_comm_seconds"] == pytest.approx(8)


def test_ranges_belong_to_their_thread() -> None:
    step = Timeline()
    step.range("replicate", 0, 100)
    step.work(50, 60, 10, thread=BACKWARD)
    found = step.microseconds()
    assert (found["replicate_seconds"], round(found["compute_seconds"])) == (0, 10)


def test_operator_replaces_a_missing_launch() -> None:
    step = Timeline()
    step.range("reduce", 0, 10, BACKWARD)
    step.add("cpu_op", "aten::add", 2, 3, BACKWARD, External_id=5)
    step.add("kernel", "add", 20, 10, 7, External_id=5, correlation=77)
    assert step.microseconds()["reduce_seconds"] == pytest.approx(10)


def test_kernels_without_a_launch_are_counted() -> None:
    step = a_step()
    step.add("kernel", "unknown", 200, 10, 7, correlation=10**6)
    found = seconds_by_part(step.events)
    assert found["unassigned_operations"] == 1
    assert found["compute_seconds"] * 1e6 == pytest.approx(40)


def test_nodes_are_those_of_torchs_functions() -> None:
    names = {f"{function.__name__}Backward" for function in (of_torch.Broadcast, of_torch.Gather)}
    assert {*names, f"{of_torch.Scatter.__name__}Backward"} == {
        name for name in RANGES if not name.startswith(RANGE)
    }
