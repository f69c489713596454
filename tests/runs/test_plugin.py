"""The plugin in runs of its own: what is stored is what the ranks measured, and the exit status says what was seen."""

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

STEP = """
import pytest

def steps(options):
    yield options.step(world_size=1, per_rank_batch_size=2)

@pytest.mark.specs(cases=steps)
def test_step(measure, spec):
    seconds = measure(spec).median_step_seconds()
    measure.metric("images_per_second", {name: 2 / t for name, t in seconds.items()})
"""


def rounds_written_by(log: Path) -> list[float]:
    """Seconds of an all_reduce in each round, from a rank's own file."""
    records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"spec"')]
    reduced = [
        record for record in records if "backend" in record["spec"]
    ]  # not the copy that is the run's control
    return [record["seconds"] / record["iterations"] for record in reduced[-3:]]  # after those that calibrate


def test_replicates_measure_every_test_side_by_side(project: Project) -> None:
    """Each in processes of its own, of which the figures are the medians; nothing of any is left."""
    project.experiment.write_text(STEP)
    run = project.run("perf", "--world-sizes", "1", "--rounds", "4", "--replicates", "3")
    run.assert_one_sentence(0, "PASS: 1 test measured")
    assert ", 3 process sets" in run.output
    (benchmark,) = project.saved_runs()[-1]["benchmarks"]
    stored = benchmark["extra_info"]["ddpperf"]
    assert [(sample["set"], len(sample["seconds"])) for sample in stored["samples"]] == [
        ("A1", 4),
        ("A2", 4),
        ("A3", 4),
    ]
    by_set = stored["metrics"]["images_per_second"]["by_set"]
    assert stored["metrics"]["images_per_second"]["value"] == sorted(by_set.values())[1]
    for replicates in ("0", "65"):
        project.run("perf", "--replicates", replicates).assert_one_sentence(
            4,
            f"--replicates takes whole numbers from 1 to 64, got {replicates!r}; pass for example --replicates 2",
        )


def test_the_stored_durations_are_those_that_the_ranks_wrote_down(project: Project) -> None:
    arguments = [
        "perf",
        "--worker-logs",
        "logs",
        "--benchmark-json",
        "copy.json",
        "-k",
        "all_reduce and not slow",
    ]
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
    command = [
        sys.executable,
        "-m",
        "pytest_benchmark",
        "compare",
        *map(str, project.root.glob(".ddpperf/runs/*/*.json")),
    ]
    compared = subprocess.run(
        command, cwd=project.root, env=project.environment, capture_output=True, text=True
    )
    assert compared.returncode == 0, compared
    assert "test_all_reduce" in compared.stdout + compared.stderr, (
        "pytest-benchmark's own compare still reads the file"
    )


def test_xdist_is_refused(project: Project) -> None:
    run = project.run("perf", "-n", "2")
    run.assert_one_sentence(4, "cannot share the machine with itself", "run it without -n")
    assert project.saved_runs() == []


def test_two_runs_on_the_same_devices_are_refused(project: Project) -> None:
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
