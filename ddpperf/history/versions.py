"""What a bisection compares: commits, interpreters or versions of a package, as sides of an A/B run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date, timedelta
from importlib.metadata import version
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.machine.child_process import run_child
from ddpperf.machine.git import CHECKOUT_SECONDS, check_out, git, remove_worktree

MOST_ENVIRONMENTS = 3  # each takes about 5 GB
PIP_SECONDS = 1800
COMPARE = "https://github.com/pytorch/pytorch/compare"
GIT_VERSION = "import torch; print(torch.version.git_version)"
DAY = re.compile(r"(?<=\.dev)\d{8}")  # of a nightly, as in torch==2.15.0.dev20261123+cu130


class CannotMeasure(Exception):
    """Raised if two commits or versions cannot be compared; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The commits of a search, the work tree in which git bisects, and where each side's code is.

    labels: an interpreter or a package version for each commit; empty if the code itself is searched.
    sides: the folders where the base's and the candidate's commits are checked out.
    """

    tree: Path
    ends: tuple[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    sides: tuple[Path, ...] = ()
    environments: Path = Path()

    def label(self, commit: str) -> str:
        return self.labels.get(commit, commit)

    def before(self, commit: str) -> str:
        return git(self.tree, "rev-parse", f"{commit}^")

    def described(self, commit: str) -> str:
        return self.labels.get(commit) or git(self.tree, "log", "-1", "--format=%h %s (%an, %as)", commit)

    def changes(self, commit: str) -> list[str]:
        """Return a link to the changes between a version of torch and the one before."""
        pair = [self.label(name) for name in (self.before(commit), commit)]
        if not all(name.startswith("torch==") for name in pair):
            return []
        pythons = [self.side(name, number) for number, name in enumerate(pair)]
        first, last = (run_child([python, "-c", GIT_VERSION], {}, 60).stdout.strip() for python in pythons)
        return [f"changes: {COMPARE}/{first}...{last}"]

    def side(self, name: str, number: int) -> str:
        """Return the value of --base (number 0) or --candidate (1) that runs a commit or version."""
        if not self.labels:
            git(self.sides[number], "checkout", "--quiet", "--detach", name, seconds=CHECKOUT_SECONDS)
            return str(self.sides[number])
        good = self.labels[self.ends[0]]
        return str(environment(self.environments, name, good)) if "==" in name else name


def candidates_of(
    good: str, bad: str, between: Sequence[str], folder: Path, environments: Path, cleanup: ExitStack
) -> Candidates:
    """Return what lies between good and bad. cleanup: removes the work trees when it is closed.

    Raises Refused if nothing can lie between them.
    """
    here = Path.cwd()
    tree = folder / "tree"
    if "==" in good or os.path.isfile(good):
        ends = [good, *(between or _days_between(good, bad)), bad]
        for one in ends:
            if ("==" in one) != ("==" in good) or not ("==" in one or os.access(one, os.X_OK)):
                raise Refused(f"{one} is no {'version' if '==' in good else 'interpreter'}, as {good} is one")
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        cleanup.callback(shutil.rmtree, tree)
        git(tree, "init", "--quiet")
        user = ("-c", "user.name=ddpperf", "-c", "user.email=", "-c", "commit.gpgsign=false")
        for one in ends:
            git(tree, *user, "commit", "--quiet", "--allow-empty", "-m", one)
        commits = git(tree, "rev-list", "--reverse", "HEAD").split()
        labels = dict(zip(commits, ends, strict=True))
        return Candidates(tree=tree, ends=(commits[0], commits[-1]), labels=labels, environments=environments)
    commits = [_commit(here, option, name) for option, name in (("--good", good), ("--bad", bad))]
    first = git(here, "merge-base", *commits) if commits[0] != commits[1] else commits[1]
    if first != commits[0] or commits[0] == commits[1]:
        advice = "exchange them" if first == commits[1] != commits[0] else f"name {first[:9]} as --good"
        advice = "name two commits" if commits[0] == commits[1] else advice
        raise Refused(f"--good {good} is no earlier commit of --bad {bad}; {advice}")
    base = folder / "base"
    places = []
    for place, commit in ((base, commits[0]), (tree, commits[1])):
        remove_worktree(here, place)
        cleanup.callback(remove_worktree, here, place)
        places.append(check_out(here, commit, place))
    return Candidates(tree=tree, ends=(commits[0], commits[1]), sides=tuple(places))


def _commit(root: Path, option: str, name: str) -> str:
    try:
        return git(root, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    except OSError as error:
        raise Refused(f"{option} {name} is no commit here, no interpreter and no NAME==VERSION") from error


def _days_between(good: str, bad: str) -> list[str]:
    """Return the nightlies of the days between two nightlies; a day without one is skipped later."""
    days = [DAY.search(text) for text in (good, bad)]
    if not (days[0] and days[1]):
        return []
    first, last = (date.fromisoformat(day[0]) for day in days if day)
    between = (first + timedelta(days=number) for number in range(1, (last - first).days))
    return [DAY.sub(f"{day:%Y%m%d}", bad) for day in between]


def environment(folder: Path, requirement: str, kept: str) -> Path:
    """Return the interpreter of an environment with a package version, which is made if it is missing.

    Before, the oldest environments are removed, but not that of `kept`. An environment has this
    environment's torch unless torch is the package. Raises CannotMeasure if pip fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [re.sub(r"[^\w.+-]", "_", text.removeprefix("torch==")) for text in (requirement, kept)]
    place = folder / names[0]
    ready = place / "ready"
    if not ready.exists() or ready.read_text(encoding="utf-8") != sys.version:
        found = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        found = [path for path in found if (path / "bin").exists() and path.name not in (*names, "pip")]
        found.sort(key=lambda path: -path.stat().st_mtime)
        for old in found[MOST_ENVIRONMENTS - 2 :]:
            shutil.rmtree(old)
        steps = [[requirement, "numpy"]]
        if not requirement.startswith("torch=="):
            steps = [[f"torch=={version('torch')}", "numpy"], ["--no-deps", requirement]]
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            *(pip + step for step in steps),
        ):
            try:
                ended = run_child(command, {}, PIP_SECONDS)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CannotMeasure(f"cannot be installed ({error})") from error
            if ended.returncode:
                errors = re.findall(r"ERROR: (.+)", ended.stderr) or [f"status {ended.returncode}"]
                raise CannotMeasure(f"cannot be installed ({errors[-1]})")
        ready.write_text(sys.version, encoding="utf-8")
    os.utime(place)
    return place / "bin" / "python"
