"""The documented script for `git bisect run`, run on a real repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import HANG_SECONDS, NOISY, REPOSITORY, SLEEPING_MODEL, Project

STEP = """
from ddpperf.specs import TrainingSpec

def test_step(measure):
    measure(TrainingSpec(model="mine:sleeping", world_size=1, per_rank_batch_size=128, strategy="single"))
"""
FAST, SLOW = 0.02, 0.2  # seconds that a step sleeps
OPTIONS = (
    "[pytest]\naddopts = --device cpu --world-sizes 1 --model mine:sleeping --rounds 3 -p no:cacheprovider\n"
)
OWN = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"} | {
    f"GIT_{role}_{what}": "t@t" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


class Repository:
    """A project of one's own under git, with nobody's settings."""

    def __init__(self, project: Project) -> None:
        self.project = project
        inherited = {
            name: value for name, value in project.environment.items() if not name.startswith("GIT_")
        }
        project.environment = inherited | OWN
        self.run("git", "init", "--quiet")

    def run(self, *command: str) -> str:
        """Run it at the root to its end, which must be a good one; gives what it printed."""
        root, environment = self.project.root, self.project.environment
        finished = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
        )
        assert finished.returncode == 0, finished
        return finished.stdout.strip()

    def commit(self, message: str, *, experiment: str = "test_it.py", seconds: float | None = FAST) -> str:
        """Commit the experiment with a model that sleeps this long, or without a model."""
        perf = self.project.root / "perf"
        for path in perf.glob("*.py"):
            path.unlink()
        (perf / experiment).write_text(STEP)
        (self.project.root / "mine.py").write_text(
            "" if seconds is None else SLEEPING_MODEL.format(seconds=seconds)
        )
        self.run("git", "add", "conftest.py", "pytest.ini", "mine.py", "perf/*.py")
        self.run("git", "commit", "--quiet", "--allow-empty", "-m", message)
        return self.run("git", "rev-parse", "HEAD")


def commands(before: Path) -> tuple[str, str]:
    """Return the documented command for the good commit, and the script for `git bisect run`.

    Both compare with a limit that a busy machine does not reach.
    """
    text = (REPOSITORY / "docs" / "comparing.md").read_text().partition("`git bisect run` skips")[2]
    text = text.replace("/path/to/before.json", str(before)).replace("python3 ", f"{sys.executable} ")
    text = text.replace("python -m", f"{sys.executable} -m")
    text = text.replace("-compare=", "-compare-fail=median:400% --benchmark-compare=")
    good = re.findall(r"\n {4}(.*)\n", text)[0]
    script = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0]
    return good, script


@pytest.mark.slow
def test_bisection_names_the_slower_commit(
    project: Project,
) -> None:
    """Git tries the middle commit first. To name the slower one it needs the PASS before it."""
    repository, before = Repository(project), project.root / "outside" / "before.json"
    on_good, script = commands(before)
    before.parent.mkdir()
    (project.root / "pytest.ini").write_text(OPTIONS)
    (project.root / ".gitignore").write_text("outside/\n")
    (project.root / "perf" / "thresholds.toml").write_text(NOISY)
    good = repository.commit("fast")
    repository.run(*on_good.split())
    repository.commit("one more")
    repository.commit("another")
    renamed = repository.commit("what is measured has another name", experiment="test_that.py")
    without = repository.commit("the model is gone", seconds=None)
    repository.commit("its name again")
    slow = repository.commit("slow", seconds=SLOW)
    repository.commit("still slow", seconds=SLOW)
    repository.run("git", "bisect", "start", "HEAD", good)
    (before.parent / "try.sh").write_text(script)
    found = repository.run("git", "bisect", "run", "sh", str(before.parent / "try.sh"))
    for said in (
        "NO VERDICT: perf/test_it.py::test_step is in before.json but was not measured",
        "PASS: 1 test measured, none slower than in before.json by more than its limit (5)",
        "FAIL: perf/test_it.py::test_step is slower: ",
        f"{slow} is the first bad commit",
    ):
        assert said in found, found
    skipped = repository.run(
        "git", "for-each-ref", "--format=%(refname:lstrip=2)", "refs/bisect/skip-*"
    ).split()
    assert sorted(skipped) == sorted(f"skip-{each}" for each in (renamed, without))
    project.assert_nothing_left()
