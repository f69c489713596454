"""The plugin in pytest runs with real ranks."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from pytest_benchmark import cli as pytest_benchmark

from ddpperf.machine.device_lock import lock_devices
from tests.canned import CannedSuite
from tests.project import Project


def rounds_written_by(log: Path) -> list[float]:
    """Return the seconds of an all_reduce in each round, from a rank's log."""
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"spec"')]
    reduced = [record for record in records if record["spec"].startswith("all_reduce ")]
    return [record["seconds"] / record["iterations"] for record in reduced[-3:]]  # after those that calibrate


@pytest.mark.slow
def test_stored_durations_are_those_of_the_ranks(
    project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = shlex.split("perf --worker-logs logs --benchmark-json copy.json -k 'all_reduce and not slow'")
    run = project.run(*arguments)
    assert run.status == 0
    (saved,) = project.saved_runs()
    (benchmark,) = saved["benchmarks"]
    by_rank = [rounds_written_by(project.root / "logs" / f"A1-rank{rank}.log") for rank in (0, 1)]
    slowest = [max(seconds) for seconds in zip(*by_rank, strict=True)]
    assert benchmark["stats"]["data"] == pytest.approx(slowest, abs=1e-9, rel=0)
    assert benchmark["extra_info"]["ddpperf"]["samples"][0]["set"] == "A1"
    assert json.loads((project.root / "copy.json").read_text()) == saved
    header = saved["ddpperf"]
    assert header["schema"] == 3
    assert header["environment"]["threads"] == 1
    assert header["environment"]["torch"] == benchmark["extra_info"]["ddpperf"]["samples"][0]["torch"]
    assert shlex.split(header["options"]["command_line"])[-len(arguments) :] == arguments, (
        "as it can be typed"
    )
    assert header["outcomes"] == {"perf/test_it.py::test_all_reduce": {"kind": "passed", "reason": ""}}
    assert header["verdict"]["status"] == "PASS"
    runs = map(str, project.root.glob(".ddpperf/runs/*/*.json"))
    monkeypatch.chdir(project.root / ".ddpperf")  # where no conftest.py would be imported
    monkeypatch.setattr("sys.argv", ["pytest-benchmark", "compare", *runs])
    pytest_benchmark.main()
    compared = "".join(capfd.readouterr())
    assert "test_all_reduce" in compared, "pytest-benchmark's own compare still reads the file"


@pytest.mark.slow
def test_xdist_is_refused(project: Project) -> None:
    run = project.run("perf", "-n", "2")
    run.assert_one_sentence(4, "measure time one after another", "run them without -n")
    assert project.saved_runs() == []


def test_second_run_on_the_devices_is_refused(
    canned_suite: CannedSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPPERF_LOCK_FOLDER", str(canned_suite.locks))
    with lock_devices(["cpu"]):
        second = canned_suite.run("perf")
    words = f"cpu is being measured by process {os.getpid()}; wait until that run ends, or stop it"
    second.assert_one_sentence(4, words)
