"""Checks that the base of an A/B run has the code that a stored run measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.machine.git import NO_COMMIT, git
from ddpperf.plugin.options.sides import Sides
from ddpperf.results.stored_runs import Baseline

# What stored runs are kept in or made into: changes here do not change what is measured.
NOT_CODE = ("perf/baselines", "perf/thresholds.toml", "docs", "README.md", "CHANGELOG.md")
FAILED = (OSError, subprocess.SubprocessError)


def require_stored_code(baseline: Baseline, sides: Sides | None, here: Path) -> None:
    """Raise Refused if the base runs other code than the stored run, or the candidate's code.

    Other code is another version of torch, or another commit of a repository that has the stored
    run's commit.
    here: the source tree that a base without --baseline-root runs.
    """
    if sides is None:
        return
    name, base = baseline.path.name, sides.base
    if sides.are_equal(here):
        raise Refused(
            f"the base equals this environment, so suspects of {name} would be compared with themselves; "
            "name the stored run's code with --baseline-root, or its interpreter with --baseline-python"
        )
    stored = sorted({sample.torch for measured in baseline.measured.values() for sample in measured.samples})
    if sides.base_torch and stored != [sides.base_torch]:
        raise Refused(
            f"{name} was measured with torch {' and '.join(stored)}, but the base has {sides.base_torch}; "
            "name an interpreter with the stored run's torch with --baseline-python, or save a new baseline"
        )
    root, commit = base.root or here, baseline.commit.removesuffix("+")
    if not _knows(root, commit) or not _differs(root, commit, committed=baseline.commit != commit):
        return
    if base.root is None:
        raise Refused(
            f"{name} was measured at commit {baseline.commit}, but this tree, which the base runs, "
            f"differs from it; check {commit} out elsewhere, and name that folder with --baseline-root"
        )
    raise Refused(
        f"{name} was measured at commit {baseline.commit}, but --baseline-root {root} holds {_held(root)}; "
        f"check {commit} out there"
    )


def _differs(root: Path, commit: str, *, committed: bool) -> bool:
    """Return whether the code of a source tree differs from a git commit.

    committed: ignore changes in the tree that are not committed.
    """
    head = ["HEAD"] if committed else []
    excluded = [f":(exclude){path}" for path in NOT_CODE]
    try:
        return bool(git(root, "diff", "--name-only", commit, *head, "--", ".", *excluded))
    except FAILED:
        return False


def _held(root: Path) -> str:
    """Return the current commit of a repository, with " with changes" if tracked files differ."""
    try:
        name = git(root, "rev-parse", "--short=9", "HEAD")
        return f"{name} with changes" if git(root, "status", "--porcelain", "--untracked-files=no") else name
    except FAILED:
        return "other files"  # git may take too long in a large repository


def _knows(root: Path, commit: str) -> bool:
    if commit in ("", NO_COMMIT):
        return False
    try:
        git(root, "cat-file", "-e", f"{commit}^{{commit}}")
    except FAILED:
        return False
    return True
