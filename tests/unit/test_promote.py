"""The command that makes a stored run a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpperf.results.promote import main, promote
from ddpperf.results.stored_runs import NoBaseline
from tests.canned import CannedSuite


def test_newest_run_becomes_the_baseline(canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    canned_suite.run("perf")
    monkeypatch.chdir(canned_suite.root)
    monkeypatch.setattr("sys.argv", ["promote", "--name", "good"])
    assert main() == 0
    (baseline,) = (canned_suite.root / "perf" / "baselines").glob("*/0001_good.json")
    (run,) = (canned_suite.root / ".ddpperf" / "runs").glob("*/*.json")
    assert json.loads(baseline.read_text()) == json.loads(run.read_text())


def test_project_without_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["promote"])
    assert main() == 4
    assert capsys.readouterr().err.strip().endswith("holds no run; measure one with python -m pytest perf/")


def test_run_with_a_failed_test_is_refused(canned_suite: CannedSuite) -> None:
    canned_suite.run("perf")
    (run,) = (canned_suite.root / ".ddpperf" / "runs").glob("*/*.json")
    document = json.loads(run.read_text())
    next(iter(document["ddpperf"]["outcomes"].values()))["kind"] = "failed"
    run.write_text(json.dumps(document))
    with pytest.raises(NoBaseline, match="cannot become a baseline: it is an A/B run, its verdict is FAIL"):
        promote(canned_suite.root, run)


@pytest.mark.parametrize("text", ["[]", "{}", '{"ddpperf": {}}', "not JSON"])
def test_file_of_another_tool_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(NoBaseline, match=r"was not saved by ddpperf|cannot be read"):
        promote(tmp_path, tmp_path / "run.json")
