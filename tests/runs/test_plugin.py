"""The plugin in pytest runs with real ranks."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import ALL_REDUCE, HANG_SECONDS, Project, wait_while_it_runs


def rounds_written_by(log: Path) -> list[float]:
    """Return the seconds of an all_reduce in each round, from a rank's log."""
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"spec"')]
    reduced = [record for record in records if record["spec"].startswith("all_reduce ")]
    return [record["seconds"] / record["iterations"] for record in reduced[-3:]]  # after those that calibrate


def test_stored_durations_are_those_of_the_ranks(project: Project) -> None:
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
    assert header["schema"] == 2
    assert header["hardware_key"].startswith(f"cpu{len(os.sched_getaffinity(0))}-")
    assert header["environment"]["backend"] == "gloo"
    assert header["environment"]["threads"] == 1
    assert header["environment"]["torch"] == benchmark["extra_info"]["ddpperf"]["samples"][0]["torch"]
    assert header["options"]["rounds"] == 3
    assert header["compared_with"] is None
    assert shlex.split(header["options"]["command_line"])[-len(arguments) :] == arguments, (
        "as it can be typed"
    )
    assert header["outcomes"] == {"perf/test_it.py::test_all_reduce": {"kind": "passed", "reason": ""}}
    assert header["verdict"]["status"] == "PASS"
    command = [sys.executable, "-m", "pytest_benchmark", "compare"]
    compared = subprocess.run(
        [*command, *map(str, project.root.glob(".ddpperf/runs/*/*.json"))],
        cwd=project.root,
        env=project.environment,
        capture_output=True,
        text=True,
    )
    assert compared.returncode == 0, compared
    assert "test_all_reduce" in compared.stdout + compared.stderr, (
        "pytest-benchmark's own compare still reads the file"
    )


@pytest.mark.slow
def test_xdist_is_refused(project: Project) -> None:
    run = project.run("perf", "-n", "2")
    run.assert_one_sentence(4, "measure time one after another", "run them without -n")
    assert project.saved_runs() == []


def test_second_run_on_the_devices_is_refused(project: Project) -> None:
    project.experiment.write_text(ALL_REDUCE.replace("))", ", fault=Fault(kind='hang', rank=1)))"))
    first = project.start("perf")
    wait_while_it_runs(first, project.ranks, "the first run started no rank")
    second = project.start("perf")
    output, _ = second.communicate(timeout=HANG_SECONDS)
    assert second.returncode == 4, output
    assert f"cpu is being measured by process {first.pid}; wait until that run ends, or stop it" in output
    assert "Traceback" not in output
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=20)
    project.assert_nothing_left()
