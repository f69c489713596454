"""Runs with two sides: real processes, whose candidate is the same, or slower, or cannot be measured."""

from __future__ import annotations

import importlib.metadata
import sys
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
FAST, SLOW, SLOWEST = (SLEEPING_MODEL.format(seconds=seconds) for seconds in (0.1, 0.16, 0.4))


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


def torch_version() -> str:
    return importlib.metadata.version("torch").partition("+")[0]


@pytest.mark.figures
def test_slower_candidate_fails_on_fresh_sets(project: Project) -> None:
    finished = run(project, "--candidate", "other")
    assert finished.status == 1, finished
    assert "test_it.py::test_step is worse: its time is 1." in finished.output
    row = project.rows()["test_step", "time"]
    assert (row["finding"], row["confirmed"]) == ("worse", True)
    assert row["ratio"] == pytest.approx(1.6, abs=0.15), "160 ms of 100, less what is beside"


@pytest.mark.figures
def test_equal_candidate_passes(project: Project) -> None:
    finished = run(project, "--candidate", sys.executable, "--benchmark-save=same")
    assert finished.status == 0, finished
    assert "is worse" not in finished.output
    for side in ("base", "candidate"):
        finished.assert_one_sentence(finished.status, f"{side}: {sys.executable}, torch {torch_version()}")
    assert "not saved as a baseline" in finished.output
    rows = project.rows()
    assert rows["test_step", "time"]["finding"] == "unchanged"
    assert rows["positive control", "time"]["control"] == "positive"
    assert rows["positive control", "time"]["ratio"] == pytest.approx(1.25, abs=0.05)
    assert rows["negative control", "time"]["ratio"] == pytest.approx(1, abs=0.05)
    (document,) = project.saved_runs()
    samples = document["benchmarks"][0]["extra_info"]["ddpperf"]["samples"]
    assert sorted(sample["side"] for sample in samples) == ["A"] * 3 + ["B"] * 3
    assert len(document["benchmarks"][0]["stats"]["data"]) == 3 * 4, "the time that is told is one side's"


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


@pytest.mark.figures
def test_suspects_are_measured_beside_the_stored_code(project: Project) -> None:
    """The stored run and the base use the fast model; the code here uses the slow one."""
    stored = run(project, "--benchmark-save=fast")
    assert stored.status == 0, stored
    (project.root / "before").mkdir()
    (project.root / "before" / "mine.py").write_text(FAST)
    (project.root / "mine.py").write_text(SLOWEST)
    compare = ("--base", "before", "--benchmark-compare-fail=median:20%", "--benchmark-compare=fast")
    finished = run(project, *compare)
    assert finished.status == 1, finished.output
    assert "test_it.py::test_step is worse: its time is " in finished.output
    assert "measured again on new process sets" in finished.output
    row = project.rows()["test_step", "time"]
    assert row["finding"] == "worse"
    assert row["ratio"] == pytest.approx(4, abs=0.4)
    # Another day's machine would do the same to what did not change.
    (project.root / "before" / "mine.py").write_text(SLOWEST)
    finished = run(project, *compare)
    finished.assert_one_sentence(
        125, "NO VERDICT: this machine or its environment changed: perf/test_it.py::test_step is slower"
    )
    assert project.rows()["test_step", "time"]["finding"] == "unchanged"
