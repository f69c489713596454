"""The plugin in runs of their own with canned measurements: the exit status says what was seen."""

from __future__ import annotations

import json
import os

import pytest

from ddpperf.errors import Refused
from tests.canned import CannedSuite
from tests.project import ALL_REDUCE

TWO = ALL_REDUCE + "\n\ndef test_second(measure):\n    measure(AllReduceSpec(world_size=2, nbytes=2048))\n"


STEP = """
import pytest
from ddpperf.specs import AllReduceSpec

def steps(options):
    yield options.step(world_size=1, per_rank_batch_size=2)

@pytest.mark.specs(cases=steps)
def test_step(measure, spec):
    seconds = measure(spec).median_step_seconds()
    measure.metric("images_per_second", {name: 2 / t for name, t in seconds.items()})
"""
ONE_DEVICE = (
    STEP
    + """
def reductions(options):
    for world_size in options.world_sizes:
        if world_size > 1:
            yield AllReduceSpec(world_size=world_size, nbytes=1024)

@pytest.mark.specs(cases=reductions)
def test_all_reduce(measure, spec):
    measure(spec)
"""
)


def test_comparison_lists_missing_results(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(TWO)
    without = canned_suite.run("perf", "--benchmark-save=first", "--benchmark-compare")
    without.assert_one_sentence(125, "NO VERDICT: no baseline for cpu", "--benchmark-save=NAME")
    without.assert_one_sentence(125, "next: store a baseline: python -m pytest perf/ --benchmark-save=NAME")
    assert "saved the baseline: perf/baselines/" in without.output, (
        "what was measured and passed may be one all the same"
    )
    canned_suite.experiment.write_text(TWO.replace("test_all_reduce", "test_renamed").replace("2048", "4096"))
    changed = canned_suite.run("perf", "--benchmark-compare")
    changed.assert_one_sentence(125, "new, so compared with nothing: test_renamed")
    changed.assert_one_sentence(125, "test_all_reduce is in 0001_first.json but was not measured")
    changed.assert_one_sentence(125, "test_second measures another spec than in 0001_first.json")


def test_read_only_project_is_refused_before_anything_is_measured(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    run = canned_suite.run()
    run.assert_one_sentence(4, f"but {canned_suite.root} is read-only; make it writable")
    assert canned_suite.canned.sampled == []


def test_uncollected_or_idle_tests_are_no_pass(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text("import nothing_like_it\n")
    uncollected = canned_suite.run()
    assert uncollected.status == 125
    assert "NO VERDICT: perf/test_it.py could not be collected: ImportError" in uncollected.output
    canned_suite.experiment.write_text("def test_idle(measure):\n    pass\n")
    canned_suite.run().assert_one_sentence(125, "test_idle passed without a measurement")


def test_failed_assertion_fails_with_its_reason(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(ALL_REDUCE + "    assert 1.5 > 2, 'speedup 1.5 is below 2'\n")
    (canned_suite.root / "perf" / "test_plain.py").write_text("def test_plain():\n    assert 1 == 2\n")
    run = canned_suite.run()
    run.assert_one_sentence(1, "FAIL: perf/test_it.py::test_all_reduce failed", "speedup 1.5 is below 2")
    run.assert_one_sentence(1, "perf/test_plain.py::test_plain failed: assert 1 == 2")
    (saved,) = canned_suite.saved_runs()
    assert len(saved["benchmarks"]) == 1, "what was measured is kept"


def test_unwritable_folder_keeps_other_results(canned_suite: CannedSuite) -> None:
    (canned_suite.root / ".ddpperf").write_text("a file in the place of the folder")
    (canned_suite.root / "perf" / "baselines").write_text("here too")
    (canned_suite.root / "copy.json").write_text("kept or replaced, but never half of each")
    run = canned_suite.run("perf", "--benchmark-save=first", "--benchmark-json", "copy.json")
    for what in ("run", "baseline"):
        run.assert_one_sentence(4, f"the {what} was not saved: ", "Not a directory: '")
    assert json.loads((canned_suite.root / "copy.json").read_text())["ddpperf"]["verdict"]["status"] == "PASS"
    assert "PASS: 1 test measured" in run.output


@pytest.mark.parametrize("place", ["judge.differences", "run_outputs.summary_lines"])
def test_fault_of_ddpperf_loses_no_run_and_is_no_fail(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    canned_suite.experiment.write_text(TWO)
    assert canned_suite.run("perf", "--benchmark-save=first").status == 0
    monkeypatch.setattr(f"ddpperf.plugin.{place}", lambda *_, **__: 1 / 0)
    finished = canned_suite.run("perf", "--benchmark-compare")
    finished.assert_one_sentence(125, "NO VERDICT: the ", "ZeroDivisionError: division by zero, in line ")
    assert len(canned_suite.saved_runs()) == 2


def test_fault_of_ddpperf_hides_no_fail(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    canned_suite.experiment.write_text(TWO + "    assert False, 'wrong'\n")
    monkeypatch.setattr("ddpperf.plugin.run_outputs.summary_lines", lambda *_, **__: 1 / 0)
    canned_suite.run("perf").assert_one_sentence(1, "FAIL: ", "test_second failed", "ZeroDivisionError")


def test_root_is_the_folder_of_the_measured_perf(canned_suite: CannedSuite) -> None:
    """pytest's root is the folder above, which has pytest's configuration."""
    above, package = canned_suite.root, canned_suite.root / "package"
    package.mkdir()
    for name in ("perf", "conftest.py"):
        (above / name).rename(package / name)
    canned_suite.root = package
    assert canned_suite.run("perf").status == 0
    assert len(canned_suite.saved_runs()) == 1
    (package / "perf" / "thresholds.toml").write_text("[decision.cpu]\nmargins = 0.1\n")
    canned_suite.run("perf").assert_one_sentence(
        4, "[decision.cpu] of perf/thresholds.toml has the unknown key"
    )
    canned_suite.root = above
    refused = canned_suite.run("package/perf")
    refused.assert_one_sentence(4, "these tests have their own ", f"start pytest in {package}")


def test_baseline_of_code_without_a_commit_says_why(canned_suite: CannedSuite) -> None:
    saved = canned_suite.run("perf", "--benchmark-save=first")
    saved.assert_one_sentence(
        0, "no code can be compared with this baseline: it has no commit (fatal: not a git"
    )


def test_code_that_changes_while_it_is_measured(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that start later would import the other code, which is not that of the stored commit."""
    canned_suite.experiment.write_text(STEP + "    open('step.py', 'w').write('edited')")
    (canned_suite.root / "step.py").touch()
    canned_suite.commit(monkeypatch)
    saved = canned_suite.run("perf", "--world-sizes", "1", "--benchmark-save=one")
    assert "baseline: its code had changes that were not committed" in saved.output, saved
    (canned_suite.root / "step.py").write_text("")
    (stored,) = (canned_suite.root / "perf" / "baselines").glob("*/*.json")
    stored.write_text(stored.read_text().replace('+"', '"'))
    compared = canned_suite.run("perf", "--world-sizes", "1", "--benchmark-compare=one")
    compared.assert_one_sentence(
        125, "tracked files changed while they were measured", "edit no file meanwhile"
    )


def test_one_device_can_be_compared(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    canned_suite.experiment.write_text(ONE_DEVICE)
    canned_suite.commit(monkeypatch)
    saved = canned_suite.run("perf", "--world-sizes", "1", "--benchmark-save=one")
    assert saved.status == 0, saved
    assert "all_reduce" not in saved.output, "it has no cell on one device, and is no skip"
    compared = canned_suite.run("perf", "--world-sizes", "1", "--benchmark-compare=one")
    assert compared.status == 0, compared


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("--fixtures",), ("test_other.py",)])
def test_only_experiments_pay_for_preparing(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """The model is looked for when the first case is made."""

    def prepare(*_: object) -> None:
        raise AssertionError("this run measures nothing")

    monkeypatch.setattr("ddpperf.plugin.session.prepare", prepare)
    (canned_suite.root / "test_other.py").write_text("def test_fine():\n    pass\n")
    (canned_suite.root / "perf" / "test_it.py").unlink()
    run = canned_suite.run(*arguments, "--model", "nowhere:model")
    assert run.status == 0
    assert "ddpperf on" not in run.output
    assert not (canned_suite.root / ".ddpperf").exists()
    assert canned_suite.run("test_other.py", "-k", "nothing").status == 5


def test_experiments_refuse_what_cannot_be_prepared(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object) -> None:
        raise Refused("--model nowhere:model cannot be imported; name another")

    monkeypatch.setattr("ddpperf.plugin.session.prepare", prepare)
    for experiment in (ALL_REDUCE, STEP):
        canned_suite.experiment.write_text(experiment)
        refused = canned_suite.run("perf", "--model", "nowhere:model")
        refused.assert_one_sentence(4, "ERROR: --model nowhere:model cannot be imported; name another")
    assert canned_suite.saved_runs() == []
