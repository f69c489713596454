"""`python -m ddpperf.bisect` on a real repository: interrupted, continued, and its answer."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.project import HANG_SECONDS, SLEEPING_MODEL, Project, git, wait_while_it_runs

STEP = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(model="mine:sleeping", world_size=1, per_rank_batch_size=128, strategy="single"))
"""
FAST, SLOW = 0.02, 0.03  # seconds that a step sleeps
TEST = "perf/test_it.py::test_step"
OPTIONS = "[pytest]\naddopts = --device cpu --world-sizes 1 --model mine:sleeping --rounds 3\n"


def commit(project: Project, message: str, model: str) -> str:
    (project.root / "mine.py").write_text(model)
    git(project.root, "add", "mine.py")
    git(project.root, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(project.root, "rev-parse", "HEAD")


def start(project: Project, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ddpperf.bisect", *arguments],
        cwd=project.root,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_clean(project: Project) -> None:
    """Check that nothing runs, nothing is checked out, and the changed checkout stayed as it was."""
    project.assert_nothing_left()
    assert len(git(project.root, "worktree", "list").splitlines()) == 1
    assert git(project.root, "for-each-ref", "refs/bisect") == ""
    assert git(project.root, "status", "--porcelain") == "M notes.txt"


@pytest.mark.slow
def test_search_is_continued_and_names_the_slower_commit(project: Project) -> None:
    root = project.root
    git(root, "init", "--quiet")
    (root / "pytest.ini").write_text(OPTIONS)
    (root / ".gitignore").write_text(".ddpperf/\n.pytest_cache/\n__pycache__/\n")
    (root / "notes.txt").write_text("one\n")
    project.experiment.write_text(STEP)
    git(root, "add", ".")
    fast, slow = (SLEEPING_MODEL.format(seconds=seconds) for seconds in (FAST, SLOW))
    good = commit(project, "fast", fast)
    commit(project, "its model is gone", "")
    commit(project, "its model again", fast + "# 1\n")
    culprit = commit(project, "slow", slow)
    commit(project, "still slow", slow + "# 2\n")
    (root / "notes.txt").write_text("two\n")
    arguments = ("--good", good, "--bad", "HEAD", TEST)

    first, state = start(project, *arguments), root / ".ddpperf" / "bisect"
    wait_while_it_runs(first, lambda: len(list(state.glob("*-*.json"))) > 1, "no step was measured")
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=HANG_SECONDS)[0]
    assert (first.returncode, said.splitlines()[-1]) == (
        125,
        "NO VERDICT: the search was interrupted; the same command continues it",
    )
    assert_clean(project)

    other = start(project, "--good", good, "--bad", culprit, TEST)
    said = other.communicate(timeout=HANG_SECONDS)[0]
    assert other.returncode == 4
    assert said.startswith(f".ddpperf/bisect has a search from {good} to HEAD that has not ended; type its")

    measured = len(project.saved_runs())
    second = start(project, *arguments)
    said = second.communicate(timeout=HANG_SECONDS)[0]
    assert second.returncode == 0, said
    assert f"FIRST BAD: {culprit[:7]} slow (t, " in said
    assert "against the one before: +4" in said or "against the one before: +5" in said
    assert "  CPU time between operators in forward: +" in said, "the reason stands below the culprit"
    assert len(project.saved_runs()) - measured <= 4, "the first comparisons are not repeated"
    assert not state.exists()
    assert_clean(project)
