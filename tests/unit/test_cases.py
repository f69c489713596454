"""Cases: skipped with a reason where they cannot be measured, and slowed down on request."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpperf.machine.compiler import compiler_problem, compiler_reason
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import Case, if_measured_as, if_valid, side_outcome, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.spec_fields import machine_reason
from ddpperf.results.outcomes import OutcomeKind
from ddpperf.specs import AllReduceSpec, EpochSpec, PartsSpec, Spec, TrainingSpec
from perf.test_all_reduce import test_fastest_all_reduce as fastest_all_reduce
from tests.canned import CannedSuite
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


@pytest.fixture
def project(canned_suite: CannedSuite) -> CannedSuite:
    """Return a project whose runs take place in this process."""
    return canned_suite


TRAINING: dict[str, Any] = {"world_size": 2, "per_rank_batch_size": 8, "strategy": "ddp"}


def reason_of(case: Case) -> str:
    """Return why a case is skipped; empty if it is not."""
    return "" if isinstance(case, Spec) else str(next(iter(case.marks)).kwargs["reason"])


@pytest.mark.parametrize("kind", [TrainingSpec, EpochSpec])
@pytest.mark.parametrize(
    "fields", [{"execution": "graph"}, {"comm_hook": "avg"}, {"strategy": "data_parallel"}]
)
def test_gpu_work_is_skipped_on_the_cpu(kind: type[TrainingSpec], fields: dict[str, Any]) -> None:
    spec = kind(**TRAINING | fields)
    assert machine_reason(spec, Machine()).endswith("; this runs on the CPU")
    assert not machine_reason(spec, Machine(device="cuda"))
    plain = kind(**TRAINING)
    assert not machine_reason(plain, Machine())


@pytest.mark.parametrize(
    "spec",
    [
        AllReduceSpec(world_size=2, nbytes=1024, algorithm="two_shot"),
        TrainingSpec(**TRAINING | {"comm_hook": "symmetric_memory", "strategy": "own_ddp"}),
    ],
)
def test_mapped_memory_needs_peer_access(spec: Spec) -> None:
    reason = machine_reason(spec, Machine(device="cuda", unmapped=(0, 1)))
    assert reason == "it maps the memory of all GPUs, and GPU 0 and GPU 1 cannot read each other's"
    assert not machine_reason(spec, Machine(device="cuda", unmapped=(1, 2))), "which has the first two alone"
    assert not machine_reason(spec, Machine(device="cuda"))
    sent = AllReduceSpec(world_size=2, nbytes=1024)
    assert not machine_reason(sent, Machine(device="cuda", unmapped=(0, 1)))


def test_mapped_memory_of_the_candidate_needs_peer_access() -> None:
    options: Any = SimpleNamespace(
        sides=SimpleNamespace(torchvision=True, spec_fields={"comm_hook": "symmetric_memory"}), device="cuda"
    )
    spec = TrainingSpec(**TRAINING)

    def reason(machine: Machine) -> str:
        outcome = side_outcome(spec, options, machine)
        assert outcome is not None
        assert outcome.kind is OutcomeKind.CANDIDATE_CANNOT
        return outcome.reason

    assert reason(Machine(device="cuda", unmapped=(0, 1))).startswith(
        "the candidate cannot measure it: it maps the memory of all GPUs"
    )
    assert side_outcome(spec, options, Machine(device="cuda")) is None
    assert reason(Machine()).startswith("the candidate cannot measure it: comm_hook symmetric_memory maps")


def test_fastest_all_reduce_needs_another_algorithm() -> None:
    nothing: Any = None
    measure = Measure(nothing, measuring(Machine(device="cuda", unmapped=(0, 1))))
    with pytest.raises(
        pytest.skip.Exception, match=r"^no other algorithm can run: it maps the memory of all GPUs, and "
    ):
        fastest_all_reduce(measure, AllReduceSpec(world_size=2, nbytes=1024, execution="graph"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("compiler", "found"),
    [
        ("/nonexistent", "/nonexistent"),
        ("/bin/false", "/bin/false"),
        ("", "an empty variable"),
        ("/bin/true", "/bin/true"),
        ("g++ 'x", "g++ 'x"),
        ("env g++ -O1", ""),
    ],
)
def test_compiled_case_needs_a_compiler(
    device: str, compiler: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does: $CXX, with arguments of its own, or g++."""
    compiled, plain = TrainingSpec(**TRAINING, execution="compile"), TrainingSpec(**TRAINING)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("CC", raising=False)
    needs = "torch.compile needs a C++ compiler with Python's headers"
    sentence = (
        f"{needs}, and {found} is not a working compiler; install both, or leave compiled executions out"
    )
    assert machine_reason(compiled, Machine(device=device)) == (sentence if found else "")
    assert not machine_reason(plain, Machine(device=device)), "which needs none"


def fake(compiler: Path) -> None:
    """A compiler whose library is empty."""
    compiler.write_text("#!/bin/sh\n/usr/bin/touch $6\n")
    compiler.chmod(0o755)


@pytest.mark.parametrize(
    "spec",
    [
        AllReduceSpec(world_size=2, nbytes=1024, algorithm="low_latency"),
        TrainingSpec(**TRAINING | {"comm_hook": "symmetric_memory", "strategy": "own_ddp"}),
    ],
)
def test_low_latency_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: Spec) -> None:
    """own_ddp runs it in eager steps, too."""
    gpus = Machine(device="cuda")
    monkeypatch.setenv("CC", "/bin/false")
    sentence = (
        "low_latency needs a C compiler with Python's headers, and /bin/false is not a working compiler; "
        "install both, or set CC"
    )
    compiler_problem.cache_clear()
    assert machine_reason(spec, gpus) == sentence
    for other in (
        AllReduceSpec(world_size=2, nbytes=1024, algorithm="two_shot"),
        TrainingSpec(**TRAINING | {"comm_hook": "symmetric_memory"}),
        TrainingSpec(**TRAINING | {"strategy": "own_ddp"}),
    ):
        assert not machine_reason(other, gpus)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    fake(tmp_path / "cc")
    compiler_problem.cache_clear()
    assert not machine_reason(spec, gpus)
    compiler_problem.cache_clear()


def test_gpus_need_a_c_compiler_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Triton does: $CC, which is one word, or gcc, or clang."""
    compiled = TrainingSpec(**TRAINING, execution="compile")
    fake(tmp_path / "g++")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    needs = "torch.compile needs a C compiler with Python's headers"
    for compiler, found in (("/bin/false",) * 2, ("g++ -O1",) * 2, (None, "clang")):
        monkeypatch.setenv("CC", compiler) if compiler is not None else monkeypatch.delenv("CC")
        compiler_problem.cache_clear()
        sentence = (
            f"{needs}, and {found} is not a working compiler; install both, or leave compiled executions out"
        )
        assert machine_reason(compiled, Machine(device="cuda")) == sentence
        assert not machine_reason(compiled, Machine(device="cpu"))
    for name in ("clang", "gcc"):
        fake(tmp_path / name)
        compiler_problem.cache_clear()
        assert not machine_reason(compiled, Machine(device="cuda")), name


@pytest.mark.skipif(bool(compiler_reason()), reason=compiler_reason() or "-")
def test_compiler_needs_python_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nonexistent")
    compiler_problem.cache_clear()
    assert "with Python's headers" in compiler_reason()


def test_invalid_spec_is_a_skipped_case() -> None:
    def refused() -> TrainingSpec:
        return TrainingSpec(**TRAINING, accumulation_steps=7)

    case = if_valid("mine", refused)
    assert (case.id, reason_of(case)) == (
        "mine",
        "accumulation_steps=7 does not divide a batch of 8 images; use a divisor",
    )
    plain = TrainingSpec(**TRAINING)
    assert if_valid("mine", lambda: plain) is plain


def test_case_without_second_measurement_is_skipped() -> None:
    plain, sharded = TrainingSpec(**TRAINING), TrainingSpec(**TRAINING | {"strategy": "fsdp"})
    assert if_measured_as(PartsSpec, plain) is plain
    case = if_measured_as(PartsSpec, sharded)
    sentence = "training_parts needs strategy single or ddp or zero1, got fsdp"
    assert not isinstance(case, Spec)
    assert (case.values, reason_of(case)) == ((sharded,), sentence)
    already = skipped("mine", "not today")
    assert if_measured_as(PartsSpec, already) is already


def test_skipped_case_is_listed_and_passes(
    project: CannedSuite,
) -> None:
    project.experiment.write_text(CASES)
    first = project.run("perf", "-rs", "--benchmark-save=first")
    first.assert_one_sentence(0, "PASS: 1 test measured")
    first.assert_one_sentence(0, "SKIPPED", "two needs two GPUs, found 0")
    first.assert_one_sentence(0, "two needs two GPUs, found 0: test_it[2rank-two]")
    assert "saved the baseline" in first.output, "all that can be measured here was"
    assert project.saved_runs()[-1]["ddpperf"]["outcomes"] == {
        f"{TEST}[{CASE}]": {"kind": "passed", "reason": ""},
        f"{TEST}[2rank-two]": {"kind": "skipped", "reason": "two needs two GPUs, found 0"},
    }
    limit = "--benchmark-compare-fail=median:20%"
    compared = project.run("perf", limit, "--benchmark-compare=first")
    compared.assert_one_sentence(0, "PASS: 1 test measured, 1 skipped, compared with 0001_first.json: ")
    project.experiment.write_text(
        CASES.replace("yield TrainingSpec(", f"yield skipped({CASE!r}, 'not today')  # ")
    )
    without = project.run("perf", "--benchmark-compare=first")
    without.assert_one_sentence(125, "NO VERDICT: no test was measured")
    without.assert_one_sentence(125, f"{TEST}[{CASE}] is in 0001_first.json but was not measured")


def test_slow_down_reaches_every_case(project: CannedSuite) -> None:
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
    ("cases", "sentence"),
    [
        ("yield 'world_size=2'", "test_it has cases that are no specs, such as 'world_size=2'"),
        ("yield None", "test_it has cases that are no specs, such as None"),
    ],
)
def test_cases_must_be_specs(project: CannedSuite, cases: str, sentence: str) -> None:
    project.experiment.write_text(
        f"import pytest\n\ndef cases(options):\n    {cases}\n\n"
        "@pytest.mark.specs(cases=cases)\ndef test_it(measure, spec):\n    measure(spec)\n"
    )
    project.run("perf").assert_one_sentence(4, f"ERROR: {sentence}")
