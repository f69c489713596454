"""Checks that the base of an A/B run has the code that a stored run measured."""

from __future__ import annotations

from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.machine.git import git
from ddpperf.plugin.options.sides import Sides
from ddpperf.results.stored_runs import Baseline

# What stored runs are kept in or made into: changes here do not change what is measured.
NOT_CODE = [
    f":(exclude){path}"
    for path in ("perf/baselines", "perf/thresholds.toml", "docs", "README.md", "CHANGELOG.md")
]


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
    head = ["HEAD"] if baseline.commit != commit else []  # of a changed tree, only the commit is known
    if not commit or not git(
        root, "diff", "--name-only", f"{commit}^{{commit}}", *head, "--", ".", *NOT_CODE
    ):
        return  # also if git fails, because the commit may be of another repository
    if base.root is None:
        raise Refused(
            f"{name} was measured at commit {baseline.commit}, but this tree, which the base runs, "
            f"differs from it; check {commit} out elsewhere, and name that folder with --baseline-root"
        )
    held = git(root, "rev-parse", "--short=9", "HEAD") or "other files"
    held += " with changes" if git(root, "status", "--porcelain", "--untracked-files=no") else ""
    raise Refused(
        f"{name} was measured at commit {baseline.commit}, but --baseline-root {root} holds {held}; "
        f"check {commit} out there"
    )
