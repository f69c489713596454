"""The command that makes a stored run a baseline."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpperf.results.promote import main, promote
from ddpperf.results.stored_runs import NoBaseline, newest_run
from tests.canned import CannedSuite
from tests.project import ALL_REDUCE


def test_newest_run_becomes_the_baseline(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    canned_suite.run("perf")
    monkeypatch.chdir(canned_suite.root)
    monkeypatch.setattr("sys.argv", ["promote", "--name", "good"])
    assert main() == 0
    (baseline,) = (canned_suite.root / "perf" / "baselines").glob("*/0001_good.json")
    (run,) = (canned_suite.root / ".ddpperf" / "runs").glob("*/*.json")
    assert json.loads(baseline.read_text()) == json.loads(run.read_text())
    assert capsys.readouterr().out == f"{baseline.relative_to(canned_suite.root)}\n", "the path, for scripts"


def test_newest_run_is_a_readable_file(tmp_path: Path) -> None:
    folder = tmp_path / ".ddpperf" / "runs" / "cpu2"
    folder.mkdir(parents=True)
    with pytest.raises(NoBaseline, match="holds no run; measure one with python -m pytest perf/"):
        newest_run(tmp_path)
    (folder / "0001_x.json").write_text("{}")
    os.mkfifo(folder / "0002_x.json")
    assert newest_run(tmp_path).name == "0001_x.json"


def stored(suite: CannedSuite, *arguments: str) -> Path:
    suite.run("perf", *arguments)
    return newest_run(suite.root)


def fail_a_test(header: dict[str, Any]) -> None:
    next(iter(header["outcomes"].values()))["kind"] = "failed"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (fail_a_test, "cannot become a baseline: its verdict is FAIL, a control failed, a test looks "),
        (lambda header: header.pop("outcomes"), "or the file is damaged; name another run"),
        (lambda header: header.update(judged={}), "is an A/B run, which has two versions of each time"),
    ],
)
def test_unfit_run_is_refused(
    canned_suite: CannedSuite, change: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    run = stored(canned_suite)
    document = json.loads(run.read_text())
    change(document["ddpperf"])
    run.write_text(json.dumps(document))
    with pytest.raises(NoBaseline, match=sentence):
        promote(canned_suite.root, run)


def test_run_of_some_tests_is_refused(canned_suite: CannedSuite) -> None:
    """Later runs read the newest baseline, so a test that it lacks would be compared with nothing."""
    canned_suite.experiment.write_text(
        ALL_REDUCE + "\ndef test_other(measure):\n    test_all_reduce(measure)\n"
    )
    baseline = promote(canned_suite.root, stored(canned_suite))
    partial = stored(canned_suite, "-k", "other")
    with pytest.raises(NoBaseline, match=r"measured 1 of the 2 tests of the baseline 0001_"):
        promote(canned_suite.root, partial)
    assert list(baseline.parent.iterdir()) == [baseline]
    assert promote(canned_suite.root, stored(canned_suite)).name == "0002_baseline.json"


def test_damaged_baseline_forbids_no_promotion(canned_suite: CannedSuite) -> None:
    run = stored(canned_suite)
    promote(canned_suite.root, run).write_text("{}")
    assert promote(canned_suite.root, run).name == "0002_baseline.json"
