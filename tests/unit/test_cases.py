"""Cases: skipped with a reason where they cannot be measured, and slowed down on request."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpperf.machine import hardware
from ddpperf.machine.compiler import CACHE_VARIABLE, compiler_problem, compiler_reason
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import case, if_valid, lacking_marks, machine_reason, parameters
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.specs import AllReduceSpec, PartsSpec, Spec, TrainingSpec
from ddpperf.workers.interpreter import Found
from perf.common.step_specs import step_case
from perf.test_all_reduce import test_fastest_all_reduce as fastest_all_reduce
from tests.canned import CannedSuite
from tests.command_line import reader
from tests.fake_measure import measuring

TEST = "perf/test_it.py::test_it"
CASE = "1rank-b8"

CASES = """
import pytest
from ddpperf.plugin.cases import skipped
from ddpperf.specs import TrainingSpec

def cases(options):
    yield TrainingSpec(world_size=1, per_rank_batch_size=8, strategy="single")
    yield skipped("2rank-two", "two needs two GPUs, found 0")

@pytest.mark.specs(cases=cases)
def test_it(measure, spec):
    measure(spec)
"""


TRAINING: dict[str, Any] = {"world_size": 2, "per_rank_batch_size": 8, "strategy": "ddp"}


NEEDS = "with Python's headers, and {} is not a working compiler; install both, or"


@pytest.mark.parametrize(
    "fields", [{"execution": "graph"}, {"comm_hook": "avg"}, {"strategy": "data_parallel"}]
)
def test_gpu_work_is_skipped_on_the_cpu(fields: dict[str, Any]) -> None:
    spec = TrainingSpec(**TRAINING | fields)
    assert machine_reason(spec, Machine()).endswith("; this runs on the CPU")
    assert not machine_reason(spec, Machine(device="cuda"))
    assert not machine_reason(TrainingSpec(**TRAINING), Machine())


@pytest.mark.parametrize(
    "spec",
    [
        AllReduceSpec(world_size=2, nbytes=1024, algorithm="two_shot"),
        TrainingSpec(**TRAINING | {"comm_hook": "symmetric_memory", "strategy": "own_ddp"}),
    ],
)
def test_mapped_memory_needs_peer_access(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not machine_reason(spec, Machine(device="cuda"))
    monkeypatch.setattr(hardware, "first_unmapped", lambda gpus: (0, 1))
    reason = machine_reason(spec, Machine(device="cuda"))
    assert reason == "it maps the memory of all GPUs, and GPU 0 and GPU 1 cannot read each other's"
    sent = AllReduceSpec(world_size=2, nbytes=1024)
    assert not machine_reason(sent, Machine(device="cuda"))


def test_candidate_that_cannot_measure_is_marked(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = reader(pytestconfig)("--rootdir=/", "--candidate", "comm_hook=symmetric_memory", gpus=2)
    marker = pytest.mark.specs(cases=lambda options: [options.step(**TRAINING)]).mark

    def marks() -> list[tuple[str, str]]:
        (step,) = parameters("test_it", marker, options, Machine(device="cuda"))
        return [(mark.name, mark.kwargs.get("reason", "")) for mark in step.marks]

    assert marks() == []
    monkeypatch.setattr(hardware, "first_unmapped", lambda gpus: (0, 1))
    (skip, reason), cannot = marks()
    assert (skip, cannot) == ("skip", ("candidate_cannot", ""))
    assert reason.startswith("the candidate cannot measure it: it maps the memory of all GPUs")


def test_dataloader_needs_torchvision(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    options = reader(pytestconfig)("--rootdir=/", "--candidate=A=1")
    loaded, plain = options.epoch(**TRAINING, input="dataloader"), options.step(**TRAINING)
    assert lacking_marks(loaded, options) == []
    assert options.sides is not None
    lacking = {"B": Found(python="python", torchvision=False)}
    options = dataclasses.replace(options, sides=dataclasses.replace(options.sides, found=lacking))
    reason = "it needs torchvision, which the base or the candidate lacks"
    (skip,) = lacking_marks(loaded, options)
    assert (skip.kwargs["reason"], lacking_marks(plain, options)) == (reason, [])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    reason = "it needs torchvision, which is not installed"
    assert (machine_reason(loaded, Machine()), machine_reason(plain, Machine())) == (reason, "")


def test_fastest_all_reduce_needs_another_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    monkeypatch.setattr(hardware, "first_unmapped", lambda gpus: (0, 1))
    measure = Measure(nothing, measuring(Machine(device="cuda")))
    with pytest.raises(
        pytest.skip.Exception, match=r"^no other algorithm can run: it maps the memory of all GPUs, and "
    ):
        fastest_all_reduce(measure, AllReduceSpec(world_size=2, nbytes=1024, execution="graph"))


@pytest.mark.parametrize(
    ("compiler", "found"), [("/nonexistent", "/nonexistent"), ("", "an empty variable"), ("env g++ -O1", "")]
)
def test_compiled_case_needs_a_compiler(compiler: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does: $CXX, with arguments of its own, or g++."""
    monkeypatch.setenv("CXX", compiler)
    reason = machine_reason(TrainingSpec(**TRAINING, execution="compile"), Machine())
    assert (NEEDS.format(found) in reason) == bool(reason) == bool(found)
    assert not machine_reason(TrainingSpec(**TRAINING), Machine()), "which needs none"


def test_gpus_need_a_c_compiler_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Triton does: $CC, which is one word, or gcc, or clang. own_ddp's low_latency runs in eager steps."""
    needing: list[Spec] = [
        TrainingSpec(**TRAINING, execution="compile"),
        AllReduceSpec(world_size=2, nbytes=1024, algorithm="low_latency"),
        TrainingSpec(**TRAINING | {"comm_hook": "symmetric_memory", "strategy": "own_ddp"}),
    ]
    others: list[Spec] = [
        AllReduceSpec(world_size=2, nbytes=1024, algorithm="two_shot"),
        TrainingSpec(**TRAINING | {"comm_hook": "symmetric_memory"}),
        TrainingSpec(**TRAINING | {"strategy": "own_ddp"}),
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)

    def reasons(specs: list[Spec], device: str = "cuda") -> list[str]:
        compiler_problem.cache_clear()
        return [reason for spec in specs if (reason := machine_reason(spec, Machine(device=device)))]

    fake(tmp_path / "g++")
    assert len([reason for reason in reasons(needing) if NEEDS.format("clang") in reason]) == 3
    assert reasons(others) == reasons(needing[:1], "cpu") == []
    monkeypatch.setenv("CC", "g++ -O1")
    assert len(reasons(needing)) == 3
    monkeypatch.delenv("CC")
    for name in ("clang", "gcc"):
        fake(tmp_path / name)
        assert reasons(needing) == [], name
    compiler_problem.cache_clear()


def fake(compiler: Path) -> None:
    """Write a compiler whose library is empty."""
    compiler.write_text("#!/bin/sh\n/usr/bin/touch $6\n")
    compiler.chmod(0o755)


@pytest.mark.skipif(bool(compiler_reason()), reason=compiler_reason() or "-")
def test_folder_without_execution_cannot_hold_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    monkeypatch.setattr(os, "statvfs", {"/mounted": flags}.__getitem__)
    monkeypatch.setenv(CACHE_VARIABLE, "/mounted")
    assert compiler_reason().startswith(
        "torch.compile cannot load what it compiles in /mounted, which is mounted noexec; set TMPDIR"
    )


@pytest.mark.skipif(bool(compiler_reason()), reason=compiler_reason() or "-")
def test_compiler_needs_python_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nonexistent")
    compiler_problem.cache_clear()
    assert "with Python's headers" in compiler_reason()


def test_impossible_training_is_a_skipped_case(pytestconfig: pytest.Config) -> None:
    plain = TrainingSpec(**TRAINING)
    assert if_valid("mine", lambda: plain) is plain
    options = reader(pytestconfig)()
    parts = case(step_case(options, 2, 8, name="mine", accumulation_steps=7))
    assert (parts.id, parts.values) == ("2rank-mine", (None,))
    assert "accumulation_steps=7 does not divide a batch of 8" in str(parts.marks)
    sharded = case(step_case(options, 2, 8, kind=PartsSpec, strategy="fsdp"))
    assert isinstance(sharded.values[0], TrainingSpec)
    assert "training_parts needs strategy single or ddp or zero1, got fsdp" in str(sharded.marks)


def test_skipped_case_is_listed_and_passes(canned_suite: CannedSuite) -> None:
    project = canned_suite
    project.experiment.write_text(CASES)
    first = project.run("perf", "-rs", "--benchmark-save=first")
    first.assert_one_sentence(0, "PASS: 1 test measured")
    first.assert_one_sentence(0, "two needs two GPUs, found 0: test_it[2rank-two]")
    assert "saved the baseline" in first.output, "all that can be measured here was"
    assert project.saved_runs()[-1]["ddpperf"]["outcomes"] == {
        f"{TEST}[{CASE}]": {"kind": "passed", "reason": ""},
        f"{TEST}[2rank-two]": {"kind": "skipped", "reason": "two needs two GPUs, found 0"},
    }


def test_slow_down_reaches_every_case(canned_suite: CannedSuite) -> None:
    project = canned_suite
    project.experiment.write_text(CASES)
    slowed = project.run("perf", "--spec", "delay_seconds=0.05", "--benchmark-save=slowed")
    assert slowed.status == 0, slowed
    stored = project.measured()[f"test_it[{CASE}]"]
    assert stored["spec"]["delay_seconds"] == 0.05
    rounds = [seconds for ranks in stored["samples"][0]["seconds"] for seconds in ranks]
    assert min(rounds) >= stored["iterations"] * 0.05
    assert "not saved as a baseline" in slowed.output
    assert not list(project.root.glob("perf/baselines/*/*"))
    nothing = project.run("perf", "-k", "nothing", "--benchmark-compare")
    nothing.assert_one_sentence(125, "NO VERDICT: no baseline for cpu", "holds a run that passed")


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("yield Tr", "yield 'world_size=2' or Tr", "measured: 'world_size=2' is no spec; yield an AllReduce"),
        ("cases=cases", "cases=cases, gate=print", "takes cases and nothing else; write @pytest.mark.specs("),
        ("yield skipped", "raise ValueError('no')  #", "test_it cannot be measured: no"),
        ('"2rank-two"', '"1rank-b8"', "test_it has two cases with the id 1rank-b8"),
    ],
)
def test_wrong_cases_are_refused(canned_suite: CannedSuite, old: str, new: str, sentence: str) -> None:
    canned_suite.experiment.write_text(CASES.replace(old, new))
    canned_suite.run("perf").assert_one_sentence(4, "ERROR: ", sentence)
