"""The documented batch script for Slurm, run by bash with the variables that Slurm sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.project import REPOSITORY, SLEEPING_MODEL, Project, wait_while_it_runs

SCRIPT = REPOSITORY / "docs" / "slurm" / "ddpperf.sh"
STEPS = """
import pytest
from ddpperf.specs import TrainingSpec

@pytest.mark.parametrize("batch", range(1, 9))
def test_step(measure, batch):
    measure(TrainingSpec(model="mine:sleeping", world_size=1, per_rank_batch_size=batch, strategy="single"))
"""


def start(project: Project, *arguments: str) -> subprocess.Popen[str]:
    project.environment |= {"SLURM_JOB_ID": "7", "PYTHON": sys.executable}
    return subprocess.Popen(
        ["bash", str(SCRIPT), "perf/", *project.options(), *arguments],
        cwd=project.root,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


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


def test_folder_with_results_is_not_touched(project: Project) -> None:
    (project.root / "ddpperf-7").mkdir()
    (project.root / "ddpperf-7" / "run.json").touch()
    job = start(project)
    output, _ = job.communicate()
    assert job.returncode == 4
    assert output.endswith("the output folder ddpperf-7 exists and is not empty; move it away\n")


def test_end_of_the_time_stores_what_was_measured(project: Project) -> None:
    project.experiment.write_text(STEPS)
    (project.root / "mine.py").write_text(SLEEPING_MODEL.format(seconds=0.2))
    job = start(project, "--world-sizes", "1", "--model", "mine:sleeping")
    pytest_process = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    wait_while_it_runs(job, project.ranks, "the ranks were not started")
    assert len(pytest_process.read_text().split()) == 1
    os.kill(job.pid, 15)  # the batch script alone, as with --signal=B:TERM
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 125, output
    assert "NO VERDICT: the run was interrupted by SIGTERM" in output
    assert (project.root / "ddpperf-7" / "verdict.md").exists()
    project.assert_nothing_left()
