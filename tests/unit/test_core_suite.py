"""The core suite: what `pytest perf/` leaves out, how it says so, and which cases of perf/ are core."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from _pytest.mark import ParameterSet

from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import parameters
from ddpperf.plugin.options.options import Options, read_options
from ddpperf.specs import EpochSpec, SamplerSpec, Spec, TrainingSpec
from perf.test_scaling import strong_laws, weak_laws
from tests.canned import CannedSuite
from tools.default_suite import experiments

pytest_plugins = ["pytester"]

# One case in the core suite and three outside, one of which is in the gate.
CASES = """
import pytest
from ddpperf.specs import AllReduceSpec

def cases(options):
    for kib in (1, 2, 4, 8):
        yield AllReduceSpec(world_size=2, nbytes=kib * 1024)

@pytest.mark.specs(
    cases=cases,
    core=lambda options, spec: spec.nbytes == 1024,
    gate=lambda options, spec: spec.nbytes == 2048,
)
def test_it(measure, spec):
    measure(spec)
"""
OTHER = "import pytest\n\n@pytest.mark.slow\ndef test_other():\n    pass\n"

Read = Callable[..., Options]


@pytest.fixture
def project(canned_suite: CannedSuite) -> CannedSuite:
    canned_suite.experiment.write_text(CASES)
    return canned_suite


@pytest.fixture
def read(pytester: pytest.Pytester) -> Read:
    """Return the options of a command line, on a machine with this many GPUs."""

    def options(*arguments: str, gpus: int = 0) -> Options:
        return read_options(pytester.parseconfig("-p", "ddpperf.plugin", *arguments), gpus)

    return options


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
    "arguments", [("perf", "--full"), ("perf/test_it.py",), ("perf", "perf/test_it.py::test_it")]
)
def test_full_and_named_files_run_all(project: CannedSuite, arguments: tuple[str, ...]) -> None:
    run = project.run(*arguments)
    run.assert_one_sentence(0, "PASS: 4 tests measured")
    assert "of the full suite" not in run.output


def test_named_case_runs_though_it_is_slow(project: CannedSuite) -> None:
    project.run("perf/test_it.py::test_it[2rank-8KiB]").assert_one_sentence(0, "PASS: 1 test measured")
    assert list(project.measured()) == ["test_it[2rank-8KiB]"]


def test_slow_tests_without_specs_run(project: CannedSuite) -> None:
    (project.root / "perf" / "test_other.py").write_text(OTHER)
    for named in ([], ["perf/test_other.py"]):  # a named file names no other file's tests
        run = project.run("perf", *named)
        run.assert_one_sentence(0, LEFT_OUT)
        assert "2 passed, 3 deselected" in run.output


@pytest.mark.parametrize(
    ("expression", "measured"), [("slow", "2 4 8"), ("not slow", "1"), ("gate", "2"), ("not gate", "1 4 8")]
)
def test_markers_select_from_the_full_suite(project: CannedSuite, expression: str, measured: str) -> None:
    run = project.run("perf", "-m", expression)
    assert list(project.measured()) == [f"test_it[2rank-{kib}KiB]" for kib in measured.split()]
    assert "of the full suite" not in run.output


def test_keyword_selects_from_the_core_suite(project: CannedSuite) -> None:
    run = project.run("perf", "-k", "4KiB or 1KiB")
    run.assert_one_sentence(0, "1 test of the full suite; --full runs them")
    slow = project.run("perf", "-k", "4KiB")
    slow.assert_one_sentence(125, "NO VERDICT: all 4 tests were left out or deselected", "--full runs")


def test_left_out_tests_of_the_baseline_are_not_missing(project: CannedSuite) -> None:
    project.experiment.write_text(CASES.replace("1024", "2**24").replace("2048", "2**25"))
    assert project.run("perf", "--full", "--benchmark-save=whole").status == 0
    run = project.run("perf", "--benchmark-compare-fail=median:20%", "--benchmark-compare=whole")
    run.assert_one_sentence(0, "PASS: 1 test measured, compared with 0001_whole.json: ")


# --- what is core in perf/


def suite(options: Options) -> dict[str, dict[str, tuple[Spec | None, set[str]]]]:
    """The spec and the markers of each default case, by the test's module and name."""
    found: dict[str, dict[str, tuple[Spec | None, set[str]]]] = {}
    for module, test, marker in experiments():
        for case in parameters(test, marker, options, Machine(device=options.device)):
            (spec,) = case.values
            assert spec is None or isinstance(spec, Spec)
            cases = found.setdefault(module, {})
            cases[f"{test}[{case.id}]"] = spec, {mark.name for mark in case.marks}
    return found


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8])
def test_every_experiment_has_a_core_case(gpus: int, read: Read) -> None:
    experiments = suite(read(gpus=gpus))
    assert len(experiments) == 12
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


@pytest.mark.parametrize("gpus", [0, 1])
def test_core_epochs_read_images_on_the_device(gpus: int, read: Read) -> None:
    options = read(gpus=gpus)
    epochs = {spec for spec in core_specs(options) if isinstance(spec, EpochSpec) and spec.world_size == 1}
    assert {spec.input for spec in epochs} == {"device"}


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_core_epochs_of_several_gpus_share_the_one_device_epoch(gpus: int, read: Read) -> None:
    """test_batch_size and test_epoch_scaling have the same one, because each GPU trains it in turn."""
    epochs = {spec for spec in core_specs(read(gpus=gpus)) if isinstance(spec, EpochSpec)}
    (scaled,) = {spec for spec in epochs if spec.world_size == gpus}
    assert epochs == {scaled, scaled.one_device()}


@pytest.mark.parametrize(("gpus", "most"), [(1, 42), (2, 105), (4, 110), (8, 115)])
def test_core_suite_of_gpus_is_small(gpus: int, most: int, read: Read) -> None:
    options = read(gpus=gpus)
    every = [case for cases in suite(options).values() for case in cases.values()]
    assert len([marks for _, marks in every if "slow" not in marks]) <= most
    steps = [spec for spec in core_specs(options) if isinstance(spec, TrainingSpec)]
    assert len([spec for spec in steps if spec.compiled]) <= 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("--world-sizes", "2", "--batch-sizes", "8", "--buffer-sizes", "4KiB,64KiB,256KiB,1MiB"),
        ("--world-sizes", "3", "--batch-sizes", "9,12"),
        ("--executions", "compile"),
        ("--model", "resnet10_cifar"),
    ],
)
def test_other_options_leave_a_core_case(arguments: tuple[str, ...], read: Read) -> None:
    for module, cases in suite(read(*arguments)).items():
        assert any("slow" not in marks for _, marks in cases.values()), module


@pytest.mark.parametrize(("gpus", "found"), [(1, "1"), (2, "1, 2")])
def test_laws_on_few_gpus_are_skipped_with_a_reason(gpus: int, found: str, read: Read) -> None:
    reason = (
        f"a fit needs two world sizes above 1, found {found}; pass --world-sizes 1,2,4, which needs 4 GPUs"
    )
    for cases in (weak_laws, strong_laws):
        (case,) = cases(read(gpus=gpus))
        assert isinstance(case, ParameterSet)
        assert [mark.kwargs for mark in case.marks] == [{"reason": reason}]
