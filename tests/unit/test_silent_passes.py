"""Runs that pytest-benchmark's own comparison passes unseen: each is no PASS here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.machine.hardware import hardware_key
from ddpperf.results.stored_runs import Storage
from tests.canned import CannedSuite
from tests.project import Finished

ALONE = ("--world-sizes", "1", "--rounds", "1")
SIDES = ("--rounds", "1", "--replicates", "2", "--candidate", "comm_hook=bf16")

COPY = """
from ddpperf.specs import CopySpec

def test_copy(measure):
    measure(CopySpec(world_size=1, nbytes=2**20))
"""
PLAIN = "def test_plain():\n    pass\n"
SKIPPED = """
import pytest

@pytest.mark.skip(reason="not today")
def test_marked(measure):
    pass
"""
SKIPPED_WITHIN = "\ndef test_within(measure):\n    pytest.skip('not here')\n"
NO_CELLS = """
import pytest

@pytest.mark.specs(cases=lambda options: [])
def test_copy(measure, spec):
    measure(spec)
"""

SCALING = """
from ddpperf.specs import AllReduceSpec, TrainingSpec

def test_speedup(measure):
    single = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
    alone = measure.reference("alone", single).median_step_seconds()
    seconds = measure(TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp")).median_step_seconds()
    measure.metric("speedup", {name: 2 * alone[name] / t for name, t in seconds.items()})

def test_bandwidth(measure):
    seconds = measure(AllReduceSpec(world_size=2, nbytes=1024)).median_step_seconds()
    measure.metric("busbw_bytes_per_second", {name: 1024 / t for name, t in seconds.items()})
"""
PARTLY = """
from tests.faults import failing
def test_partly(measure):
    measure(AllReduceSpec(world_size=2, nbytes=2048))
    measure.reference("more", failing("kill"))
"""
THRESHOLDS = """
[[threshold]]
hardware = "{key}"
test = "test_speedup"
speedup = 1e6

[[threshold]]
hardware = "{key}"
test = "test_bandwidth"
busbw_bytes_per_second = 1e15
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the JSON of a run of COPY, outside of the projects that compare with it."""
    project = CannedSuite(tmp_path_factory.mktemp("measured"))
    project.experiment.write_text(COPY)
    run = project.run("perf", *ALONE, "--benchmark-json", "base.json")
    run.assert_one_sentence(0, "PASS: 1 test measured")
    yield project.root / "base.json"
    project.clean()


# --- tests that are not the baseline's


@pytest.mark.parametrize(
    ("source", "beside"),
    [
        (None, PLAIN),
        (None, None),  # pytest's own status for it is 5, which `git bisect run` takes for a bad commit
        (COPY.replace("test_copy", "check_copy"), PLAIN),
        (NO_CELLS, PLAIN),
    ],
    ids=["no file but a plain test", "no file", "no function", "no cells"],
)
def test_baseline_without_any_test_left_is_no_verdict(
    canned_suite: CannedSuite, measured: Path, source: str | None, beside: str | None
) -> None:
    for path, text in (
        (canned_suite.experiment, source),
        (canned_suite.root / "perf" / "test_plain.py", beside),
    ):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
    run = canned_suite.run("perf", *ALONE, f"--benchmark-compare={measured}")
    run.assert_one_sentence(125, "perf/test_it.py::test_copy is in base.json but was not measured")


def test_skipped_run_is_no_pass(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(SKIPPED + SKIPPED_WITHIN)
    run = canned_suite.run()
    run.assert_one_sentence(125, "NO VERDICT: no test was measured")
    run.assert_one_sentence(125, "not today: test_marked")
    run.assert_one_sentence(125, "not here: test_within")


# --- a run that is worse


def test_slower_run_is_not_compared_with(canned_suite: CannedSuite, measured: Path) -> None:
    canned_suite.experiment.write_text(COPY)
    document = json.loads(measured.read_text())
    for sample in document["benchmarks"][0]["extra_info"]["ddpperf"]["samples"]:
        sample["seconds"] = [[seconds / 100 for seconds in ranks] for ranks in sample["seconds"]]
    runs = Storage(root=canned_suite.root, hardware_key=hardware_key("cpu", [])).runs
    runs.mkdir(parents=True)
    (runs / "0001_before.json").write_text(json.dumps(document))
    for runs_kept in (2, 3):
        run = canned_suite.run("perf", *ALONE, "--benchmark-autosave", "--benchmark-compare")
        run.assert_one_sentence(125, "NO VERDICT: ", "because 0001_before.json does not say which commit")
        run.assert_one_sentence(
            125, "such as perf/test_it.py::test_copy: its time is 100.000 times the stored"
        )
        assert len(canned_suite.saved_runs()) == runs_kept
        assert canned_suite.saved_runs()[-1]["ddpperf"]["compared_with"] == "0001_before.json"
    assert not (canned_suite.root / ".benchmarks").exists()


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CannedSuite, Finished]]:
    """A run with thresholds and a failed test is compared with a run without them."""
    project, key = CannedSuite(tmp_path_factory.mktemp("failed")), hardware_key("cpu", [])
    project.experiment.write_text(SCALING)
    project.run("perf", "--rounds", "1").assert_one_sentence(0, "PASS: 2 tests measured")
    project.experiment.write_text(SCALING + PARTLY)
    (project.root / "perf" / "thresholds.toml").write_text(THRESHOLDS.format(key=key))
    run = project.run("perf", "--rounds", "1", "--benchmark-compare-fail=median:9900%", "--benchmark-compare")
    yield project, run
    project.clean()


def test_lower_speedup_fails_without_slower_times(failed: tuple[CannedSuite, Finished]) -> None:
    project, run = failed
    header = project.saved_runs()[-1]["ddpperf"]
    for test, metric in (("test_speedup", "speedup"), ("test_bandwidth", "busbw")):
        run.assert_one_sentence(
            1, f"perf/test_it.py::{test} failed: {metric} ", " is below 1", " of perf/thresholds.toml"
        )
        assert header["outcomes"][f"perf/test_it.py::{test}"]["kind"] == "failed"
    assert project.rows()["test_speedup", "time"]["stored_ratio"] == pytest.approx(1, abs=0.01)
    assert "is worse: " not in run.output


def test_failure_after_measuring_fails_the_run(
    failed: tuple[CannedSuite, Finished],
) -> None:
    project, run = failed
    run.assert_one_sentence(
        1, "perf/test_it.py::test_partly failed: rank 1 of set A1 was killed by SIGKILL (at sample)"
    )
    assert "test_partly" in project.measured(), "what was measured is kept"
    found = Storage(root=project.root, hardware_key=hardware_key("cpu", [])).find(True)
    assert found.name.startswith("0001_")


# --- two sides


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        (SKIPPED, (), "NO VERDICT: no test was measured"),
        (COPY, ("-k", "nothing"), "NO VERDICT: all 1 tests were deselected on the command line"),
        (PLAIN, (), "NO VERDICT: no test was measured"),
    ],
    ids=["skipped", "deselected", "no experiment"],
)
def test_unmeasured_ab_run_is_no_pass(
    canned_suite: CannedSuite, source: str, arguments: tuple[str, ...], words: str
) -> None:
    canned_suite.experiment.write_text(source)
    run = canned_suite.run("perf", *SIDES, *arguments)
    run.assert_one_sentence(125, words)
    run.assert_one_sentence(125, "base and candidate were not compared: no test measured both")
