"""What a bisection compares: commits, interpreters or versions of a package, as sides of an A/B run."""

from __future__ import annotations

import os
import re
import shutil
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
DAY = re.compile(r"(?<=\.dev)\d{8}")  # of a nightly, as in torch==2.15.0.dev20261123+cu130
CHANGES_OF_TORCH = "https://github.com/pytorch/pytorch/compare/{}...{}"
GIT_VERSION = "import torch; print(torch.version.git_version)"


class CannotMeasure(Exception):
    """Raised if two commits or versions cannot be compared; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The commits of a search, and how each of them is run.

    tree: the work tree in which git bisects. ends: the commits of good and bad. labels: the interpreter
    or package version that each commit stands for; empty if the commits themselves are run. sides: the
    work trees of base and candidate. environments: the folder of the environments of package versions.
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
        ended = [run_child([python, "-c", GIT_VERSION], {}, PIP_SECONDS) for python in pythons]
        return [f"changes: {CHANGES_OF_TORCH.format(*(one.stdout.strip() for one in ended))}"]

    def side(self, label: str, number: int) -> str:
        """Return the value of --base (number 0) or --candidate (1) that runs a commit or version."""
        if not self.labels:
            git(self.sides[number], "checkout", "--quiet", "--detach", label, seconds=CHECKOUT_SECONDS)
            return str(self.sides[number])
        kept = self.label(self.ends[0])
        return str(environment(self.environments, label, kept)) if "==" in label else label


def listed(names: Sequence[str], tree: Path, environments: Path, cleanup: ExitStack) -> Candidates:
    """Return interpreters or package versions, the oldest first, as a repository of empty commits.

    cleanup: removes the repository when it is closed. Raises Refused if the names are of two kinds.
    """
    for name in names:
        if ("==" in name) != ("==" in names[0]) or not ("==" in name or os.access(name, os.X_OK)):
            kind = "NAME==VERSION" if "==" in names[0] else "interpreter"
            raise Refused(f"{name} is no {kind}, as {names[0]} is one; name several of one kind")
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    cleanup.callback(shutil.rmtree, tree, ignore_errors=True)
    git(tree, "init", "--quiet")
    user = ("-c", "user.name=ddpperf", "-c", "user.email=", "-c", "commit.gpgsign=false")
    for name in names:
        git(tree, *user, "commit", "--quiet", "--allow-empty", "-m", name)
    commits = git(tree, "rev-list", "--reverse", "HEAD").split()
    labels = dict(zip(commits, names, strict=True))
    return Candidates(tree=tree, ends=(commits[0], commits[-1]), labels=labels, environments=environments)


def committed(good: str, bad: str, tree: Path, cleanup: ExitStack) -> Candidates:
    """Return the commits from good to bad, in two new work trees that `cleanup` removes.

    Raises Refused if good is no ancestor of bad.
    """
    here, ends = Path.cwd(), []
    for option, name in (("--good", good), ("--bad", bad)):
        try:
            ends.append(git(here, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}"))
        except OSError as error:
            what = f"{option} {name} is no commit here, no interpreter and no NAME==VERSION; name one"
            raise Refused(what) from error
    common = git(here, "rev-list", "--max-count=1", ends[0], f"^{ends[1]}")  # a commit that bad lacks
    if common or ends[0] == ends[1]:
        reversed_ends = not git(here, "rev-list", "--max-count=1", ends[1], f"^{ends[0]}")
        advice = "exchange them" if common and reversed_ends else "name an earlier commit as --good"
        raise Refused(f"--good {good} is no earlier commit of --bad {bad}; {advice}")
    places = []
    for place, commit in zip((tree.with_name("base"), tree), ends, strict=True):
        remove_worktree(here, place)  # as a killed search leaves it
        cleanup.callback(remove_worktree, here, place)
        places.append(check_out(here, commit, place))
    return Candidates(tree=tree, ends=(ends[0], ends[1]), sides=tuple(places))


def days_between(good: str, bad: str) -> list[str]:
    """Return the nightlies of the days between two nightlies; a day without one is skipped later."""
    first, last = (DAY.search(name) for name in (good, bad))
    if not (first and last):
        return []
    begin, end = (date.fromisoformat(day[0]) for day in (first, last))
    days = (begin + timedelta(days=number) for number in range(1, (end - begin).days))
    return [DAY.sub(f"{day:%Y%m%d}", bad) for day in days]


def environment(folder: Path, requirement: str, kept: str) -> Path:
    """Return the interpreter of an environment with a package version, and make it if it is missing.

    The oldest environments are removed before, but not that of `kept`. Unless the package is torch, the
    environment has the torch of this one. Raises CannotMeasure if pip fails.
    """
    names = [re.sub(r"[^\w.+-]", "_", text.removeprefix("torch==")) for text in (requirement, kept)]
    place = folder / names[0]
    python, ready = place / "bin" / "python", place / "ready"
    if not ready.exists() or ready.read_text(encoding="utf-8") != sys.version:
        found = [path.parent for path in folder.glob("*/pyvenv.cfg") if not path.parent.is_symlink()]
        others = [path for path in found if path.name not in names]
        for old in sorted(others, key=lambda path: -path.stat().st_mtime)[MOST_ENVIRONMENTS - 2 :]:
            shutil.rmtree(old)
        run_pip([sys.executable, "-m", "venv", "--clear", str(place)])
        install = [str(python), "-m", "pip", "install", "--quiet"]
        if requirement.startswith("torch=="):
            run_pip([*install, requirement, "numpy"])
        else:  # which torch may require in another version
            run_pip([*install, f"torch=={version('torch')}", "numpy"])
            run_pip([*install, "--no-deps", requirement])
        ready.write_text(sys.version, encoding="utf-8")
    os.utime(place)
    return python


def run_pip(command: Sequence[str]) -> str:
    """Run a command that installs a package or looks for one, and return what it prints.

    Raises CannotMeasure if the command fails.
    """
    ended = run_child(command, {}, PIP_SECONDS)
    if ended.returncode:
        errors = re.findall(r"ERROR: (.+)", ended.stderr) or [f"status {ended.returncode}"]
        raise CannotMeasure(f"it cannot be installed ({errors[-1]})")
    return ended.stdout
