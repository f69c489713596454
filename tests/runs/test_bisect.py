"""The documented script for `git bisect run`, run on a real repository."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.project import HANG_SECONDS, REPOSITORY, SLEEPING_MODEL, Project, git

STEP = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(model="mine:sleeping", world_size=1, per_rank_batch_size=128, strategy="single"))
"""
FAST, SLOW = 0.02, 0.2  # seconds that a step sleeps
OPTIONS = (
    "[pytest]\naddopts = --device cpu --world-sizes 1 --model mine:sleeping --rounds 3 -p no:cacheprovider\n"
)


def run(project: Project, *command: str) -> str:
    """Run a command at the root to its end, which must be a good one; return what it printed."""
    finished = subprocess.run(
        command,
        cwd=project.root,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert finished.returncode == 0, finished
    return finished.stdout


def commit(
    project: Project, message: str, *, experiment: str = "test_it.py", seconds: float | None = FAST
) -> str:
    """Commit the experiment with a model that sleeps this long, or without a model."""
    perf = project.root / "perf"
    for path in perf.glob("*.py"):
        path.unlink()
    (perf / experiment).write_text(STEP)
    (project.root / "mine.py").write_text("" if seconds is None else SLEEPING_MODEL.format(seconds=seconds))
    git(project.root, "add", "conftest.py", "pytest.ini", "mine.py", "perf/*.py")
    git(project.root, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(project.root, "rev-parse", "HEAD")


def documented(before: str) -> tuple[str, str]:
    """Return the documented command for the good commit, and the script for `git bisect run`.

    Both compare with a margin that a busy machine does not reach.
    """
    text = (REPOSITORY / "docs" / "comparing.md").read_text().partition("`git bisect run` skips")[2]
    text = text.replace("/path/to/before.json", before).replace("python3 ", f"{sys.executable} ")
    text = text.replace("python -m", f"{sys.executable} -m")
    text = text.replace("-compare=", "-compare-fail=median:400% --benchmark-compare=")
    good = re.findall(r"\n {4}(.*)\n", text)[0]
    script = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0]
    return good, script


@pytest.mark.slow
def test_bisection_names_the_slower_commit(project: Project) -> None:
    """Git tries the middle commit first. To name the slower one it needs the PASS before it."""
    git(project.root, "init", "--quiet")
    outside = project.root / "outside"
    outside.mkdir()
    on_good, script = documented(str(outside / "before.json"))
    (project.root / "pytest.ini").write_text(OPTIONS)
    (project.root / ".gitignore").write_text("outside/\n")
    good = commit(project, "fast")
    run(project, *on_good.split())
    commit(project, "one more")
    commit(project, "another")
    renamed = commit(project, "what is measured has another name", experiment="test_that.py")
    without = commit(project, "the model is gone", seconds=None)
    commit(project, "its name again")
    slow = commit(project, "slow", seconds=SLOW)
    commit(project, "still slow", seconds=SLOW)
    git(project.root, "bisect", "start", "HEAD", good)
    (outside / "try.sh").write_text(script)
    found = run(project, "git", "bisect", "run", "sh", str(outside / "try.sh"))
    for said in (
        "NO VERDICT: perf/test_it.py::test_step is in before.json but was not measured",
        "PASS: 1 test measured, nothing got slower than the code of before.json: ",
        "FAIL: perf/test_it.py::test_step is worse: its time is ",
        f"{slow} is the first bad commit",
    ):
        assert said in found, found
    skipped = git(project.root, "for-each-ref", "--format=%(refname:lstrip=2)", "refs/bisect/skip-*").split()
    assert sorted(skipped) == sorted(f"skip-{each}" for each in (renamed, without))
    project.assert_nothing_left()
