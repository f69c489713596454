"""The documented batch script for Slurm, run by bash with Slurm's variables, or by a real Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.project import REPOSITORY, Project, wait_until, wait_while_it_runs
from tests.slurm_cluster import slurm_cluster

SCRIPT = REPOSITORY / "docs" / "slurm" / "ddpperf.sh"
# Takes the place of pytest: it ends with NO VERDICT half a second after its first SIGTERM.
STORES = """
import pathlib, signal, time

def store(*_):
    signal.signal(signal.SIGTERM, lambda *_: None)
    pathlib.Path("signalled").touch()
    time.sleep(0.5)
    raise SystemExit(125)

signal.signal(signal.SIGTERM, store)
pathlib.Path("started").touch()
time.sleep(60)
"""


def start(project: Project, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    slurm = {"SLURM_JOB_ID": "7", "PYTHON": sys.executable}
    return subprocess.Popen(
        ["bash", str(SCRIPT), "perf/", *project.options(), *arguments],
        cwd=project.root,
        env=project.environment | slurm | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_job_leaves_its_results(project: Project) -> None:
    job = start(project)
    output, _ = job.communicate()
    assert job.returncode == 0, output
    assert output.startswith(
        "the job has no GPUs, so ddpperf measures the CPU; for GPUs, pass --gpus-per-node=N"
    )
    left = sorted(path.name for path in (project.root / "ddpperf-7").iterdir())
    assert left == ["junit.xml", "report.html", "run.json", "verdict.md"]
    project.assert_nothing_left()


def test_refusal_is_the_status_of_the_job(project: Project) -> None:
    job = start(project, "--device", "cuda")
    output, _ = job.communicate()
    assert job.returncode == 4, output
    assert "ERROR: world_size=2 needs 2 GPUs, found 0; pass --device cpu" in output


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"SLURM_JOB_ID": ""}, "this is no job of Slurm; submit the script with sbatch --gpus-per-node=N"),
        ({"PYTHON": ""}, "the interpreter .venv/bin/python was not found; make the environment, or set"),
        ({"SLURM_JOB_ID": "8"}, "the output folder ddpperf-8 exists and is not an empty folder; move it"),
        ({"SLURM_JOB_ID": "9"}, "the output folder ddpperf-9 exists and is not an empty folder; move it"),
    ],
)
def test_job_that_cannot_run_is_refused(project: Project, variables: dict[str, str], sentence: str) -> None:
    (project.root / "ddpperf-8").mkdir()
    (project.root / "ddpperf-8" / "run.json").touch()
    (project.root / "ddpperf-9").touch()
    job = start(project, **variables)
    output, _ = job.communicate()
    assert job.returncode == 4
    assert output.splitlines()[-1].startswith(sentence)
    assert not (project.root / "ddpperf-7").exists()


def test_second_signal_waits_for_the_results(project: Project) -> None:
    python = project.root / "python"
    python.write_text(f"#!/bin/sh\nexec \"{sys.executable}\" -c '{STORES}'\n")
    python.chmod(0o755)
    job = start(project, PYTHON=str(python))
    for file in ("started", "signalled"):
        wait_while_it_runs(job, (project.root / file).exists, f"pytest has not {file}")
        os.kill(job.pid, signal.SIGTERM)  # the batch script alone, as with --signal=B:TERM
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 125, output
    project.assert_nothing_left()


@pytest.mark.slow
def test_job_measures_on_two_nodes(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a Slurm cluster of two nodes on this machine."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), ["a", "b"]) as variables:
        environment = project.environment | variables | {"PYTHON": sys.executable}
        submit = ["sbatch", "--parsable", "--nodes=2", str(SCRIPT), "perf/", *project.options()]
        submit += ["--interface", "lo"]
        number = subprocess.check_output(submit, cwd=project.root, env=environment, text=True).strip()
        log = project.root / f"ddpperf-{number}.log"
        found = ""

        def has_ended() -> bool:
            nonlocal found
            found = subprocess.check_output(["scontrol", "show", "job", number], env=environment, text=True)
            return re.search(r"JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", found) is None

        try:
            wait_until(has_ended, 300, lambda: found + (log.read_text() if log.exists() else ""))
        finally:
            subprocess.run(["scancel", "--full", number], env=environment, check=True)
        assert "ExitCode=0:0" in found, log.read_text()
        assert re.search(r"^ddpperf on 2xcpu", log.read_text(), re.MULTILINE)
        project.assert_nothing_left()
