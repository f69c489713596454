"""Runs with two sides: real processes, whose candidate is the same, or slower, or cannot be measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import SLEEPING_MODEL, Finished, Project

STEPS = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(model="mine:sleeping", world_size=1, per_rank_batch_size=8, strategy="single"))
"""
# Few sets: the machine adds next to nothing to what a step sleeps.
SETTINGS = "[decision.cpu]\nscreen_sets = 3\nconfirm_sets = 3\n"
FAST, SLOW = (SLEEPING_MODEL.format(seconds=seconds) for seconds in (0.1, 0.16))


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Its current folder has the fast model, the folder `other` the slower one."""
    project = Project(tmp_path)
    project.experiment.write_text(STEPS)
    (tmp_path / "mine.py").write_text(FAST)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text(SLOW)
    (tmp_path / "perf" / "thresholds.toml").write_text(SETTINGS)
    try:
        yield project
    finally:
        project.clean()


def run(project: Project, *arguments: str, rounds: str = "4") -> Finished:
    sizes = ("--world-sizes", "1", "--model", "mine:sleeping", "--rounds", rounds)
    return project.run("perf", *sizes, *arguments)


@pytest.mark.figures
def test_slower_candidate_fails_on_fresh_sets(project: Project) -> None:
    finished = run(project, "--candidate", "other")
    assert finished.status == 1, finished
    assert "test_it.py::test_step is worse: its time is 1." in finished.output
    row = project.rows()["test_step", "time"]
    assert (row["finding"], row["confirmed"]) == ("worse", True)
    assert row["ratio"] == pytest.approx(1.6, abs=0.15), "160 ms of 100, less what is beside"


DYING = FAST + "\nimport os\nif 'DIE' in os.environ and 'RANK' in os.environ:\n    os._exit(7)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "status", "words"),
    [
        ("--candidate", 1, ["failed: the candidate's rank 0 of set B", "exited with status 7"]),
        (
            "--base",
            125,
            ["NO VERDICT: perf/test_it.py::test_step was not measured: the base's rank 0 of set A"],
        ),
    ],
)
def test_dying_rank_decides_by_its_side(project: Project, side: str, status: int, words: list[str]) -> None:
    (project.root / "mine.py").write_text(DYING)
    run(project, side, "DIE=1").assert_one_sentence(status, *words)
