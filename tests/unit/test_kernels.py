"""A step's kernels: names from one profile, digests, and sets that differ."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpperf.instruments.kernels import digest, digest_of_ranks, kernel_names, other_kernels
from ddpperf.measuring import clock as timing
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import TrainingSpec

CPU = torch.device("cpu")
STEP = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")


def multiply() -> None:
    matrix = torch.ones(4, 4, requires_grad=True)
    with torch.profiler.record_function("mine::note"):
        torch.mm(matrix, matrix).relu().sum().backward()


# --- names


def test_a_cpu_step_names_its_operators_once() -> None:
    names = kernel_names(multiply, CPU)
    assert names == sorted(set(names))
    assert {"aten::mm", "aten::relu", "autograd::engine::evaluate_function: MmBackward0"} <= set(names)
    assert "mine::note" not in names
    assert all("::" in name for name in names)


EVENTS = [
    {"cat": "kernel", "name": "void at::native::fill<4>(float*)"},
    {"cat": "kernel", "name": "triton_poi_fused_relu_3"},
    {"cat": "kernel", "name": "triton_poi_fused_relu_3"},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)"},
    {"cat": "gpu_memset", "name": "Memset (Device)"},
    {"cat": "gpu_user_annotation", "name": "nccl:all_reduce"},
    {"cat": "cuda_runtime", "name": "cudaGraphLaunch"},
    {"cat": "cpu_op", "name": "aten::mm"},
    {"name": "process_name"},
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace a GPU's profiler by one that lists its calls, the last of which may be told to fail."""
    calls: list[str] = []

    def call(name: str) -> Any:
        calls.append(name)
        if calls[0] == f"fail {name}":
            raise RuntimeError(f"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES when {name}")

    def exported(path: str) -> None:
        call("exported")
        Path(path).write_text(json.dumps({"traceEvents": EVENTS}))

    def made(*, activities: list[Any]) -> Any:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        call("made")
        found = {"start": lambda: call("started"), "stop": lambda: call("stopped")}
        return SimpleNamespace(**found, export_chrome_trace=exported)

    monkeypatch.setattr(torch.profiler, "profile", made)
    monkeypatch.setattr(timing, "synchronize", lambda device: calls.append("synchronized"))
    return calls


GPU = torch.device("cuda", 0)


def test_a_gpu_step_names_kernels_only(calls: list[str]) -> None:
    names = kernel_names(lambda: calls.append("step"), GPU)
    assert names == ["triton_poi_fused_relu_3", "void at::native::fill<4>(float*)"]
    assert calls == ["synchronized", "made", "started", "step", "synchronized", "stopped", "exported"]


@pytest.mark.parametrize("failing", ["made", "started", "exported"])
def test_a_failed_profile_names_no_kernels(
    calls: list[str], capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    """If a rank left out the step, its group would wait."""
    calls.append(f"fail {failing}")
    assert kernel_names(lambda: calls.append("step"), GPU) == []
    assert calls.count("step") == 1
    assert ("stopped" in calls) == (failing != "made"), "whatever of it has started"
    assert f"could not be profiled: RuntimeError('CUPTI_ERROR_INSUFFICIENT_PRIVILEGES when {failing}')" in (
        capsys.readouterr().out
    )


# --- digests


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (["a", "b"], ["b", "a", "b"], True),
        (["a b"], ["a", "b"], False),
        (["kernel<at 0x7f00aB>"], ["kernel<at 0x55e>"], True),  # where a process keeps it
        (["triton_poi_fused_relu_3"], ["triton_poi_fused_relu_4"], False),  # something else was fused
    ],
)
def test_equal_kernels_have_equal_digests(one: list[str], other: list[str], equal: bool) -> None:
    assert (digest(one) == digest(other)) == equal


def test_a_sets_digest_depends_on_every_rank() -> None:
    assert digest_of_ranks(["aa", "bb"]) != digest_of_ranks(["bb", "aa"])
    assert digest_of_ranks(["aa", ""]) == digest_of_ranks([]) == ""


# --- sets that differ


def measured(**kernels: str) -> Measured:
    """Return measured sets; a set's name begins with its side's."""
    samples = [
        Sample(set=name, side=name[0], torch="2.11", seconds=((0.1,),), kernels=digest)
        for name, digest in kernels.items()
    ]
    return Measured(spec=STEP, iterations=1, samples=tuple(samples))


@pytest.mark.parametrize(
    ("kernels", "groups"),
    [
        ({"A1": "", "A2": "x", "A3": "x"}, None),
        ({"A1": "x", "B2": "y", "A3": "x", "B4": "y"}, None),  # two sides may differ
        ({"A1": "x", "A2": "y", "A3": "y", "A4": "x"}, "A1, A4; A2, A3"),
    ],
)
def test_sets_with_other_kernels_are_named(kernels: dict[str, str], groups: str | None) -> None:
    found = [f"process sets ran different kernels: {groups}"] if groups else []
    assert other_kernels(measured(**kernels)) == found
