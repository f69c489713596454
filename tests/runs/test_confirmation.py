"""A comparison with a stored run in a real repository, whose next commit slows the optimizer down."""

from __future__ import annotations

import shutil

import pytest

from tests.project import REPOSITORY, SLEEPING_MODEL, Project, git

STEP = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(model="mine:sleeping", world_size=1, per_rank_batch_size=8, strategy="single"))
"""
UPDATE = "        self.scaler.step(self.optimizer)\n"
OPTIONS = ("--world-sizes", "1", "--model", "mine:sleeping", "--rounds", "4")


@pytest.mark.slow
def test_slower_commit_fails_beside_the_stored_one(project: Project) -> None:
    """The model sleeps 60 ms, and the next commit sleeps as long before each update."""
    root = project.root
    shutil.copytree(
        REPOSITORY / "ddpperf", root / "ddpperf", ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    project.environment["PYTHONPATH"] = str(root)
    project.experiment.write_text(STEP)
    (root / "mine.py").write_text(SLEEPING_MODEL.format(seconds=0.06))
    (root / ".gitignore").write_text(".ddpperf/\n__pycache__/\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "fast")
    stored = project.run("perf", *OPTIONS, "--benchmark-save=fast")
    assert stored.status == 0, stored
    step = root / "ddpperf" / "training" / "step.py"
    source = step.read_text()
    assert UPDATE in source
    step.write_text(source.replace(UPDATE, f"        __import__('time').sleep(0.06)\n{UPDATE}"))
    git(root, "commit", "--quiet", "-a", "-m", "slow")
    finished = project.run("perf", *OPTIONS, "--benchmark-compare")
    finished.assert_one_sentence(
        1, "FAIL: perf/test_it.py::test_step is worse: its time is ", "measured again on new process sets"
    )
    row = project.rows()["test_step", "time"]
    assert row["ratio"] == pytest.approx(2, abs=0.2)
    assert row["stages"] == ["first", "repeat"]
    assert len(git(root, "worktree", "list").splitlines()) == 1
    assert list(root.glob(".ddpperf/base/*")) == []
