"""The cases that -m gate selects: none that launches or noise bind."""

from __future__ import annotations

from typing import Any

import pytest

from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import case_id, parameters
from ddpperf.plugin.options.options import Options, read_options
from ddpperf.specs import AllReduceSpec, TrainingSpec
from perf import test_all_reduce, test_precision, test_scaling
from tests.command_line import specs_of
from tools.default_suite import experiments

pytest_plugins = ["pytester"]


def options(pytester: pytest.Pytester, gpus: int) -> Options:
    return read_options(pytester.parseconfig("-p", "ddpperf.plugin"), gpus)


def gated(options: Options) -> list[Any]:
    """The specs of the experiments' cases in the gate that can be measured."""
    machine = Machine(device=options.device)
    cases = [case for _, test, marker in experiments() for case in parameters(test, marker, options, machine)]
    chosen = [case for case in cases if {mark.name for mark in case.marks} & {"gate", "skip"} == {"gate"}]
    return [case.values[0] for case in chosen]


def test_gpu_cases_are_captured_or_large(pytester: pytest.Pytester) -> None:
    selected = gated(options(pytester, gpus=4))
    steps = [spec for spec in selected if isinstance(spec, TrainingSpec)]
    assert all(spec.captured for spec in steps)
    assert {spec.world_size for spec in steps} == {1, 4}
    assert {spec.per_rank_batch_size for spec in steps if spec.world_size == 4} == {32, 128, 512}
    assert {spec.strategy for spec in steps} == {"single", "ddp", "zero1"}
    assert {spec.nbytes for spec in selected if isinstance(spec, AllReduceSpec)} == {
        2**24,
        2**26,
        2**28,
        2**30,
    }


def test_own_ddp_is_gated_if_requested(pytester: pytest.Pytester) -> None:
    chosen = read_options(pytester.parseconfig("-p", "ddpperf.plugin", "--spec", "strategy=own_ddp"), 4)
    spread = [spec for spec in gated(chosen) if isinstance(spec, TrainingSpec) and spec.world_size == 4]
    assert {(spec.strategy, spec.comm_hook) for spec in spread} == {("own_ddp", "symmetric_memory")}


def test_largest_group_maps_memory_first(pytester: pytest.Pytester) -> None:
    """A larger group would need fresh process sets afterwards."""
    for cases in (test_all_reduce.calls, test_scaling.weak_scaling, test_scaling.epochs):
        found = specs_of(cases(options(pytester, gpus=4)))
        sizes = [spec.world_size for spec in found if spec.maps_memory]
        assert sizes == sorted(sizes, reverse=True)
        assert set(sizes) == {2, 4}


@pytest.mark.parametrize("computes_bf16", [True, False])
def test_cpu_gate_has_no_all_reduce(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, computes_bf16: bool
) -> None:
    monkeypatch.setattr(test_precision, "computes_bf16", lambda: computes_bf16)
    selected = gated(options(pytester, gpus=0))
    assert all(isinstance(spec, TrainingSpec) for spec in selected)
    bf16 = {"1rank-b32-bf16"} if computes_bf16 else set()
    assert {case_id(spec, options(pytester, gpus=0)) for spec in selected} == bf16 | {
        "1rank-b32",
        "2rank-b32",
        "2rank-b32-ddp+bf16",
        "2rank-b32-zero1",
    }


@pytest.mark.parametrize(("arguments", "gpus"), [(("--precision", "bf16"), 0), ((), 1)])
def test_bf16_is_measured_if_requested_and_on_gpus(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], gpus: int
) -> None:
    monkeypatch.setattr(test_precision, "computes_bf16", lambda: False)
    chosen = read_options(pytester.parseconfig("-p", "ddpperf.plugin", *arguments), gpus)
    assert "bf16" in {spec.precision for spec in specs_of(test_precision.precisions(chosen))}


def test_skipped_bf16_stays_in_the_gate(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_precision, "computes_bf16", lambda: False)
    (marker,) = test_precision.test_precision.pytestmark  # type: ignore[attr-defined]
    cases = parameters("test_precision", marker, options(pytester, gpus=0), Machine())
    (left_out,) = (case for case in cases if case.id == "1rank-b32-bf16")
    assert {mark.name for mark in left_out.marks} == {"skip", "gate"}
