"""The options of pytest, of pytest-benchmark and of other plugins that docs/options.md lists."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddpperf.specs import AllReduceSpec, Spec
from tests.canned import CannedSuite, step_seconds
from tests.project import Project

NAMES = ["test_one", "test_two", "test_three", "test_four"]
IMPORT = "from ddpperf.specs import AllReduceSpec, TrainingSpec\n"


def one_test(name: str, nbytes: int) -> str:
    """Return the source of a test of a large all_reduce: small ones are for information only on a CPU."""
    return f"\ndef {name}(measure):\n    measure(AllReduceSpec(world_size=2, nbytes={nbytes}))\n"


# Four tests in two files
THREE = IMPORT + "".join(one_test(name, 2 ** (24 + place)) for place, name in enumerate(NAMES[:3]))
OTHER = IMPORT + one_test("test_four", 2**27)
UNIT = "def test_unit():\n    {}\n"

# A rank dies in the first run of the first test, and an assertion fails in the first run of the second.
FLAKY = """
from pathlib import Path
from ddpperf.specs import AllReduceSpec
from tests.faults import failing

def first(name):
    known = Path(name).exists()
    Path(name).touch()
    return not known

def test_dies(measure):
    measure(failing("kill") if first("died") else AllReduceSpec(world_size=2, nbytes=1024))

def test_asserts(measure):
    measure(AllReduceSpec(world_size=2, nbytes=2048))
    assert not first("asserted"), "once"

def test_good(measure):
    measure(AllReduceSpec(world_size=2, nbytes=4096))
"""

# An A/B run measures each test twice; the second measurement fails.
FAILS_LATER = """
from pathlib import Path
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(world_size=2, per_rank_batch_size=8, strategy="ddp"))
    known = Path("known").exists()
    Path("known").touch()
    assert not known, "fails when measured again"
"""

# The limit is for the hanging test alone: starting ranks may take long on a busy machine.
HANGS = """
import pytest
from ddpperf.specs import AllReduceSpec
from tests.faults import failing

def test_before(measure):
    measure(AllReduceSpec(world_size=2, nbytes=4096))

@pytest.mark.timeout(0.5)
@pytest.mark.parametrize("spec", [failing("hang")], ids=["for_ever"])
def test_hang(measure, spec):
    measure(spec)

def test_after():
    pass
"""


class Suite(CannedSuite):
    """Two files of experiments, and a unit test; pytest keeps its cache."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.experiment.write_text(THREE)
        (root / "perf" / "test_other.py").write_text(OTHER)
        (root / "test_unit.py").write_text(UNIT.format("pass"))

    def options(self) -> list[str]:
        options = super().options()
        options.remove("no:cacheprovider")
        options.remove("-p")
        return options

    def outcomes(self) -> dict[str, str]:
        """Return how each test of the newest run ended, by the test's name."""
        outcomes = self.saved_runs()[-1]["ddpperf"]["outcomes"].items()
        return {test.rpartition("::")[2]: outcome["kind"] for test, outcome in outcomes}

    def slow_down(self, nbytes: int) -> None:
        """Make only the all_reduce of this size ten times slower from now on, but not the stored code's."""

        def seconds(spec: Spec, name: str) -> float:
            is_base = name.startswith("A") and name != "A1"
            slower = isinstance(spec, AllReduceSpec) and spec.nbytes == nbytes and not is_base
            return step_seconds(spec, name) * (10 if slower else 1)

        self.canned.seconds = seconds


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    mine = Suite(tmp_path)
    yield mine
    mine.clean()


LIMIT = ("--benchmark-compare-fail=median:100%", "--benchmark-compare")


# --- which tests run


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        (["-k", "one or four"], ["test_one", "test_four"]),
        (["-m", "not slow"], NAMES),
        (["--deselect", "perf/test_it.py::test_two"], ["test_one", "test_three", "test_four"]),
        (["--ignore", "perf/test_other.py"], NAMES[:3]),
        (["--ignore-glob", "*other*"], NAMES[:3]),
        (["--ff"], NAMES),
        (["--nf"], NAMES),
        (["-n", "0"], NAMES),
        (["-p", "no:cacheprovider"], NAMES),
    ],
    ids=" ".join,
)
def test_selected_tests_alone_are_compared(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, arguments: list[str], measured: list[str]
) -> None:
    """A test that the command line leaves out is not missing in a comparison."""
    suite.commit(monkeypatch)
    assert suite.run("perf", "--benchmark-save=first").status == 0
    if "-n" in arguments:
        arguments = ["-p", "xdist", *arguments]
    run = suite.run("perf", *arguments, *LIMIT)
    run.assert_one_sentence(0, f"PASS: {len(measured)} test")
    assert list(suite.measured()) == measured


@pytest.mark.parametrize("arguments", [["-k", "unit"], ["--benchmark-skip"]], ids=" ".join)
def test_run_of_other_tests_has_no_verdict(suite: Suite, arguments: list[str]) -> None:
    run = suite.run(".", *arguments)
    assert run.status == 0, run
    assert "1 passed, 4 deselected" in run.output
    assert "VERDICT" not in run.output
    assert suite.saved_runs() == []
    (suite.root / "test_unit.py").write_text(UNIT.format("assert 1 == 2"))
    assert suite.run(".", *arguments).status == 1
    for only in (["--benchmark-only"], ["--benchmark-only", "--benchmark-skip"]):
        suite.run(".", *only).assert_one_sentence(0, "PASS: 4 tests measured")


@pytest.mark.parametrize("arguments", [["-k", "nothing"], ["--benchmark-skip"], ["-m", "gate"]], ids=" ".join)
def test_run_without_any_test_is_no_verdict(suite: Suite, arguments: list[str]) -> None:
    run = suite.run("perf", *arguments)
    run.assert_one_sentence(125, "NO VERDICT: all 4 tests were deselected on the command line")


@pytest.mark.parametrize(
    "option", ["--collect-only", "--setup-only", "--setup-plan", "--fixtures", "--fixtures-per-test"]
)
def test_listing_measures_and_saves_nothing(suite: Suite, option: str) -> None:
    run = suite.run("perf", option, "--benchmark-save=first", "--verdict", "v.md", "--junitxml", "j.xml")
    assert run.status == 0, run
    assert "VERDICT" not in run.output
    assert suite.canned.sampled == []
    assert suite.saved_runs() == []
    assert not (suite.root / "v.md").exists()
    assert "verdict" not in (suite.root / "j.xml").read_text()


# --- where a run ends


@pytest.mark.parametrize(
    ("option", "failed"), [("-x", 1), ("--maxfail=1", 1), ("--maxfail=2", 2), ("--sw", 1)]
)
def test_run_ends_after_failed_tests(suite: Suite, option: str, failed: int) -> None:
    suite.experiment.write_text(FLAKY)
    assert suite.run("perf/test_it.py", option).status == 1
    rest = ["not run"] * (2 - failed)
    assert list(suite.outcomes().values()) == ["failed"] * failed + rest + ["not run"]


@pytest.mark.parametrize("option", ["-v", "--reruns=1", "--timeout=60"])
def test_failure_of_a_repeated_measurement_counts(suite: Suite, option: str) -> None:
    suite.experiment.write_text(FAILS_LATER)
    suite.canned.seconds = lambda spec, name: 0.01 * (4 if name.startswith("B") else 1)
    run = suite.run("perf/test_it.py", "--replicates", "2", "--candidate", "comm_hook=bf16", option)
    run.assert_one_sentence(1, "fails when measured again")


# --- --lf


def test_last_failed_runs_tests_that_got_slower(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.commit(monkeypatch)
    suite.run("perf", "--benchmark-save=first")
    suite.slow_down(2**25)
    for arguments, tests in ([], NAMES), (["--lf"], ["test_two"]), (["--lf"], ["test_two"]):
        run = suite.run("perf", *arguments, *LIMIT)
        run.assert_one_sentence(1, f"FAIL: 1 of {len(tests)} measurement", "worse: test_two by +")
        assert list(suite.measured()) == tests
    suite.slow_down(0)
    suite.run("perf", "--lf", *LIMIT).assert_one_sentence(0, "PASS: 1 test measured")


# --- output


def test_junit_has_times_and_the_slower_test(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.commit(monkeypatch)
    suite.run("perf", "--benchmark-save=first")
    suite.slow_down(2**25)
    suite.run("perf", "--junitxml", "j.xml", *LIMIT)
    cases = list(ElementTree.parse(suite.root / "j.xml").iter("testcase"))
    failed = [
        (case.get("name"), failure.get("message")) for case in cases for failure in case.iter("failure")
    ]
    assert [name for name, _ in failed] == ["test_two", "verdict"]
    assert all(message and "worse" in message for _, message in failed)
    assert {float(case.get("time", "nan")) >= 0 for case in cases} == {True}


@pytest.mark.parametrize(
    "options",
    ["-q", "-v", "-s", "--tb=short", "--durations=0 -vv", "--setup-show", "--log-cli-level=INFO", "-W error"],
)
def test_verdict_is_printed_with_any_format(suite: Suite, options: str) -> None:
    run = suite.run("perf", *shlex.split(options))
    run.assert_one_sentence(0, "PASS: 4 tests measured")
    if "durations" in options:
        assert re.search(r"\ds call +perf/test_it.py::test_one", run.output), run


def test_terminal_plugin_is_not_needed(suite: Suite) -> None:
    run = suite.run("perf", "-p", "no:terminal", "--verdict", "v.md")
    assert (run.status, run.output) == (0, "")
    assert "PASS" in (suite.root / "v.md").read_text()


# --- pytest-benchmark


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        ("LOCAL_RANK", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_several_processes_of_pytest_are_refused(suite: Suite, rank: str, size: str) -> None:
    suite.environment |= {rank: "1", size: "2"}
    suite.run("perf").assert_one_sentence(4, "2 processes of pytest", "without torchrun, mpirun or srun")
    assert suite.run("test_unit.py").status == 0, "other tests may use a launcher"
    suite.environment[size] = "1"
    assert suite.run("perf").status == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--benchmark-disable", "pass --benchmark-skip"),
        ("--benchmark-storage=elsewhere", "has no effect on performance tests; leave it out"),
        ("-p no:benchmark", "ddpperf needs pytest-benchmark"),
        ("--benchmark-min-rounds=9 --benchmark-warmup=on --benchmark-disable-gc", "has no effect on perf"),
    ],
)
def test_options_that_cannot_apply_are_refused(suite: Suite, options: str, words: str) -> None:
    for option in [options] if " no:" in options else options.split():
        name = option.partition("=")[0]
        suite.run("perf", *shlex.split(option)).assert_one_sentence(4, "ERROR: ", name[-12:], words)
    assert suite.canned.sampled == []


def test_other_benchmarks_keep_their_options(suite: Suite) -> None:
    (suite.root / "test_unit.py").write_text("def test_unit(benchmark):\n    benchmark(sorted, [])\n")
    options = "--benchmark-min-rounds=9 --benchmark-warmup=off"
    assert suite.run("test_unit.py", "--benchmark-disable").status == 0
    assert suite.run("test_unit.py", *shlex.split(options)).status == 0
    (suite.root / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\n")
    suite.run(".").assert_one_sentence(0, "PASS: 4 tests measured")
    (suite.root / "pytest.ini").write_text("[pytest]\naddopts = --benchmark-disable\n")
    suite.run("perf").assert_one_sentence(4, "--benchmark-disable")
    suite.run("perf", "--benchmark-enable").assert_one_sentence(0, "PASS: 4 tests measured")


def test_table_of_pytest_benchmark_is_printed_on_request(suite: Suite) -> None:
    for option, shown in (("--benchmark-verbose", True), ("-v", False)):
        run = suite.run("perf", option)
        run.assert_one_sentence(0, "PASS: 4 tests measured")
        assert bool(re.search(r"Name \(time in ms\) +Min +Max ", run.output)) == shown, run


def test_uncollected_file_is_a_missing_result(suite: Suite) -> None:
    """Only --ignore of the command line leaves a stored test out silently."""
    suite.run("perf", "--benchmark-save=first")
    (suite.root / "perf" / "conftest.py").write_text(f'collect_ignore = ["{suite.experiment.name}"]\n')
    (suite.root / "perf" / "test_other.py").write_text(suite.experiment.read_text())
    run = suite.run("perf", *LIMIT)
    assert run.status == 125, run
    assert "but was not measured" in run.output or "were not measured" in run.output, run


# --- other plugins


def test_shuffled_tests_give_the_same_results(suite: Suite) -> None:
    """The tables and the stored run keep the order of the files."""
    suite.run("perf", "--benchmark-save=first")
    orders = []
    for seed in range(4):
        run = suite.run("perf", "-v", "-p", "randomly", f"--randomly-seed={seed}", *LIMIT)
        run.assert_one_sentence(125, "NO VERDICT: this run cannot be compared with the stored run's code")
        orders.append(re.findall(r"::(test_\w+) PASSED", run.output))
        assert list(suite.measured()) == NAMES
        assert list(suite.outcomes()) == NAMES
    assert any(order != NAMES for order in orders), orders


def test_rerun_measures_again_after_a_dead_rank(suite: Suite) -> None:
    suite.experiment.write_text(FLAKY)
    (suite.root / "asserted").touch()
    for arguments, status in ([], 0), (["--fail-on-flaky"], 7):
        (suite.root / "died").unlink(missing_ok=True)
        run = suite.run("perf/test_it.py", "--reruns", "1", *arguments)
        run.assert_one_sentence(status, "PASS: 3 tests measured")
        assert set(suite.outcomes().values()) == {"passed"}
        notes = suite.measured()["test_dies"]["notes"]
        assert "failed at first, and was run again: rank 1 of set A1 was killed" in json.dumps(notes)
        assert "run again" in run.output


@pytest.mark.slow
def test_timeout_fails_its_test_alone(project: Project) -> None:
    project.experiment.write_text(HANGS)
    run = project.run("perf", "--timeout", "60")
    run.assert_one_sentence(
        1, "FAIL: perf/test_it.py::test_hang[for_ever] failed: Timeout (>0.5s) from pytest-timeout"
    )
    assert list(project.measured()) == ["test_before"]
    assert "1 failed, 2 passed" in run.output
