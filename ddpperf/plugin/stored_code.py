"""Whether the base of a comparison is the code that the stored run measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ddpperf.machine.git import NO_COMMIT, git
from ddpperf.plugin.options.sides import Sides
from ddpperf.results.stored_runs import Baseline


def require_stored_code(baseline: Baseline, sides: Sides | None, here: Path) -> None:
    """Raise pytest.UsageError for a base that is the candidate, or is known to be other code than what the stored run measured:
    of another torch, or another commit of a repository that holds the stored one. here: the tree that a base without a root
    runs."""
    if sides is None:
        return
    base, torch = sides.base, sides.base_torch
    if sides.are_equal(here):
        raise pytest.UsageError(
            f"the base is this very environment, so that suspects of {baseline.path.name} would be measured beside themselves; "
            "name the stored run's code with --baseline-root, or its interpreter with --baseline-python"
        )
    stored = sorted({sample.torch for each in baseline.measured.values() for sample in each.samples})
    if torch and stored != [torch]:
        raise pytest.UsageError(
            f"{baseline.path.name} was measured with torch {' and '.join(stored)}, its code's side has {torch}; "
            "name an interpreter that has the stored run's with --baseline-python, or save a baseline anew"
        )
    root, wanted = base.root or here, baseline.commit.removesuffix("+")
    if not _knows(root, wanted) or not _differs(root, wanted, committed=baseline.commit != wanted):
        return
    if base.root is None:
        raise pytest.UsageError(
            f"{baseline.path.name} was measured at commit {baseline.commit}, from which this tree, which the base runs, "
            f"differs; check {wanted} out elsewhere, and name that with --baseline-root"
        )
    raise pytest.UsageError(
        f"{baseline.path.name} was measured at commit {baseline.commit}, --baseline-root {root} holds {_held(root)}; "
        f"check {wanted} out there"
    )


def _differs(root: Path, wanted: str, *, committed: bool) -> bool:
    """Whether the files of a tree are others than at a commit, but for what stored runs are kept in and made into. committed:
    of a run whose tree had changes, which nothing tells, what is committed counts alone."""
    kept = [
        f":(exclude){path}"
        for path in ("perf/baselines", "perf/thresholds.toml", "docs", "README.md", "CHANGELOG.md")
    ]
    try:
        return bool(
            git(root, "diff", "--name-only", wanted, *(["HEAD"] if committed else []), "--", ".", *kept)
        )
    except (OSError, subprocess.SubprocessError):
        return False


def _held(root: Path) -> str:
    """The commit that a repository holds, and whether its files were changed, not what lies beside them."""
    try:
        name = git(root, "rev-parse", "--short=9", "HEAD")
        return f"{name} with changes" if git(root, "status", "--porcelain", "--untracked-files=no") else name
    except (OSError, subprocess.SubprocessError):
        return "other files"  # git, which may take long in a large one, does not say more


def _knows(root: Path, wanted: str) -> bool:
    """Whether the repository of `root` has the commit: the code under test may lie in another, whose commits no run tells."""
    if wanted in ("", NO_COMMIT):
        return False
    try:
        git(root, "cat-file", "-e", f"{wanted}^{{commit}}")
    except (OSError, subprocess.SubprocessError):
        return False
    return True
