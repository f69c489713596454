"""The core suite and the gate: which cases they select, in perf/ and by the command line."""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import pytest

from ddpperf.plugin.cases import case_id
from ddpperf.plugin.collected_tests import Outcomes
from ddpperf.plugin.options.options import Options
from ddpperf.results.outcomes import OutcomeKind
from ddpperf.specs import CollectiveSpec, EpochSpec, SamplerSpec, Spec, TrainingSpec
from ddpperf.specs.collective import Call
from perf import test_all_reduce, test_precision, test_scaling
from tests.canned import CannedSuite
from tests.command_line import Read, specs_of, suite

# One case in the core suite and three outside, one of which is in the gate.
CASES = """
import pytest
from ddpperf.plugin.cases import case
from ddpperf.specs import AllReduceSpec

def cases(options):
    for kib in (1, 2, 4, 8):
        yield case(AllReduceSpec(world_size=2, nbytes=kib * 1024), core=kib == 1, gate=kib == 2)

@pytest.mark.specs(cases=cases)
def test_it(measure, spec):
    measure(spec)
"""
OTHER = "import pytest\n\n@pytest.mark.slow\ndef test_other():\n    pass\n"


@pytest.fixture
def project(canned_suite: CannedSuite) -> CannedSuite:
    canned_suite.experiment.write_text(CASES)
    return canned_suite


LEFT_OUT = "3 tests of the full suite; --full runs them"


# --- what runs


def test_folder_runs_the_core_suite(project: CannedSuite) -> None:
    run = project.run("perf", "--verdict", "verdict.md")
    run.assert_one_sentence(0, "PASS: 1 test measured")
    run.assert_one_sentence(0, LEFT_OUT)
    assert LEFT_OUT in (project.root / "verdict.md").read_text()
    assert list(project.measured()) == ["test_it[2rank-1KiB]"]
    assert project.saved_runs()[-1]["ddpperf"]["left_out"] == {"perf/test_it.py": 3}


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        ("perf --full", "1 2 4 8"),
        ("perf/test_it.py", "1 2 4 8"),
        ("perf perf/test_it.py::test_it", "1 2 4 8"),
        ("perf/test_it.py::test_it[2rank-8KiB]", "8"),
        ("perf -m slow", "2 4 8"),
        ("perf -m gate", "2"),
        ("perf -m not\\ gate", "1 4 8"),
    ],
)
def test_other_tests_run_on_request(project: CannedSuite, arguments: str, measured: str) -> None:
    run = project.run(*shlex.split(arguments))
    assert list(project.measured()) == [f"test_it[2rank-{kib}KiB]" for kib in measured.split()]
    assert "of the full suite" not in run.output


def test_slow_tests_without_specs_run(project: CannedSuite) -> None:
    (project.root / "perf" / "test_other.py").write_text(OTHER)
    for named in ([], ["perf/test_other.py"]):  # a named file names no other file's tests
        run = project.run("perf", *named)
        run.assert_one_sentence(0, LEFT_OUT)
        assert "2 passed, 3 deselected" in run.output


def test_keyword_selects_from_the_core_suite(project: CannedSuite) -> None:
    run = project.run("perf", "-k", "4KiB or 1KiB")
    run.assert_one_sentence(0, "1 test of the full suite; --full runs them")
    slow = project.run("perf", "-k", "4KiB")
    slow.assert_one_sentence(125, "NO VERDICT: all 4 tests were left out or deselected", "--full runs")


def test_left_out_tests_of_the_baseline_are_not_missing(
    project: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.experiment.write_text(CASES.replace("1024", "2**24"))
    project.commit(monkeypatch)
    assert project.run("perf", "--full", "--benchmark-save=whole").status == 0
    run = project.run("perf", "--benchmark-compare=whole")
    run.assert_one_sentence(0, "PASS: 1 test measured, nothing got slower than the code of 0001_whole.json: ")


def test_test_that_ended_after_its_setup_has_not_run() -> None:
    outcomes = Outcomes()
    outcomes.expect(["a"])
    outcomes.pytest_runtest_logreport(pytest.TestReport("a", ("", None, "a"), {}, "passed", None, "setup"))
    assert outcomes.measured["a"].kind is OutcomeKind.NOT_RUN


# --- what is core in perf/


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_every_experiment_has_a_core_case(gpus: int, read: Read) -> None:
    experiments = suite(read(gpus=gpus))
    assert len(experiments) == 13
    for module, cases in experiments.items():
        possible = [marks for _, marks in cases.values() if "skip" not in marks]
        assert not possible or any("slow" not in marks for marks in possible), module


def core_specs(options: Options) -> set[Spec]:
    cases = [case for cases in suite(options).values() for case in cases.values()]
    return {spec for spec, marks in cases if spec is not None and not marks & {"slow", "skip"}}


def test_core_suite_of_a_cpu_is_small(read: Read) -> None:
    """An A/B run measures each spec twice, so there are few specs."""
    repeated = [spec for spec in core_specs(read()) if not isinstance(spec, SamplerSpec)]
    steps = [spec for spec in repeated if isinstance(spec, TrainingSpec)]
    assert len([spec for spec in steps if not spec.counts]) <= 12
    assert len(repeated) - len(steps) <= 14


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_core_epochs_are_few_and_read_images_on_the_device(gpus: int, read: Read) -> None:
    """On several GPUs, test_batch_size and test_epoch_scaling share the one of one device."""
    epochs = {spec for spec in core_specs(read(gpus=gpus)) if isinstance(spec, EpochSpec)}
    on_one = {spec for spec in epochs if spec.world_size == 1}
    assert {spec.input for spec in on_one} == {"device"}
    if gpus > 1:
        (scaled,) = epochs - on_one
        assert on_one == {scaled.one_device()}


@pytest.mark.parametrize(("gpus", "most"), [(1, 42), (2, 105), (4, 110), (8, 115)])
def test_core_suite_of_gpus_is_small(gpus: int, most: int, read: Read) -> None:
    options = read(gpus=gpus)
    every = [case for cases in suite(options).values() for case in cases.values()]
    assert len([marks for _, marks in every if "slow" not in marks]) <= most
    steps = [spec for spec in core_specs(options) if isinstance(spec, TrainingSpec)]
    assert len([spec for spec in steps if spec.compiled]) <= 3


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("--world-sizes 2 --batch-sizes 8 --buffer-sizes 4KiB,64KiB,256KiB,1MiB", 0),
        ("--world-sizes 3 --batch-sizes 9,12", 0),
        ("--model resnet18_cifar --batch-sizes 1 --global-batch-sizes 2", 0),
        ("--batch-sizes 8 --spec accumulation_steps=2 --executions eager,compile", 0),
        ("--executions compile,eager --spec strategy=zero1 --spec comm_hook=powersgd", 4),
    ],
)
def test_other_options_leave_a_core_case(line: str, gpus: int, read: Read) -> None:
    for module, cases in suite(read(*line.split(), gpus=gpus)).items():
        assert any("slow" not in marks for _, marks in cases.values()), module


@pytest.mark.parametrize(("gpus", "found"), [(1, "1"), (2, "1, 2")])
def test_laws_on_few_gpus_are_skipped_with_a_reason(gpus: int, found: str, read: Read) -> None:
    reason = f"a fit needs two world sizes above 1, found {found}; pass --world-sizes 1,2,4, which needs 4"
    for weak in (True, False):
        (case,) = test_scaling.laws(read(gpus=gpus), weak=weak)
        assert reason in str(case)


# --- the gate: no case that launches or noise bind


def gated(options: Options) -> list[Any]:
    """The specs of the experiments' cases in the gate that can be measured."""
    cases = [case for cases in suite(options).values() for case in cases.values()]
    return [spec for spec, marks in cases if marks & {"gate", "skip"} == {"gate"}]


def test_gated_gpu_cases_are_captured_or_large(read: Read) -> None:
    selected = gated(read(gpus=4))
    steps = [spec for spec in selected if isinstance(spec, TrainingSpec)]
    assert all(spec.captured for spec in steps)
    assert {spec.world_size for spec in steps} == {1, 4}
    assert {spec.per_rank_batch_size for spec in steps if spec.world_size == 4} == {32, 128, 512}
    assert {spec.strategy for spec in steps} == {"single", "ddp", "zero1"}
    calls = {(call_kind(spec), spec.dtype, spec.nbytes) for spec in selected if isinstance(spec, Call)}
    sizes, kinds = (2**16, 2**20, 2**24, 2**28), ("all_reduce", *test_all_reduce.KINDS)
    assert calls == set(itertools.product(kinds, ("fp32", "bf16"), sizes))
    by_two_shot = {spec.nbytes for spec in selected if getattr(spec, "algorithm", "") == "two_shot"}
    assert by_two_shot == {2**24, 2**28}


def call_kind(call: Call) -> str:
    return call.kind if isinstance(call, CollectiveSpec) else call.measurement


def test_own_ddp_is_gated_if_requested(read: Read) -> None:
    selected = gated(read("--spec", "strategy=own_ddp", gpus=4))
    spread = [spec for spec in selected if isinstance(spec, TrainingSpec) and spec.world_size == 4]
    assert {(spec.strategy, spec.comm_hook) for spec in spread} == {("own_ddp", "symmetric_memory")}


def test_largest_group_maps_memory_first(read: Read) -> None:
    """A larger group would need fresh process sets afterwards."""
    for cases in (test_all_reduce.calls, test_scaling.weak_scaling, test_scaling.epochs):
        sizes = [spec.world_size for spec in specs_of(cases(read(gpus=4))) if spec.maps_memory]
        assert sizes == sorted(sizes, reverse=True)
        assert set(sizes) == {2, 4}


@pytest.mark.parametrize("computes_bf16", [True, False])
def test_cpu_gate_has_no_all_reduce(read: Read, monkeypatch: pytest.MonkeyPatch, computes_bf16: bool) -> None:
    monkeypatch.setattr(test_precision, "computes_bf16", lambda: computes_bf16)
    options = read()
    assert {case_id(spec, options) for spec in gated(options)} == {
        *(["1rank-b32-bf16"] if computes_bf16 else []),
        *("1rank-b32", "2rank-b32", "2rank-b32-ddp+bf16", "2rank-b32-zero1"),
    }
    requested = read("--precision", "bf16")
    assert "bf16" in {spec.precision for spec in specs_of(test_precision.precisions(requested))}
    _, marks = suite(options)["test_precision"]["test_precision[1rank-b32-bf16]"]
    assert marks == {"gate"} | (set() if computes_bf16 else {"skip"}), "it stays in the gate"
