"""Check the code of a stored run out as the base of an A/B run, or check the base that the user names."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.machine.git import NO_COMMIT, NOT_CODE, check_out, git, remove_worktree
from ddpperf.machine.git import commit as commit_of
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.results.stored_runs import Baseline
from ddpperf.workers.interpreter import Side, check_side


def require_stored_code(baseline: Baseline, sides: Sides | None, here: Path) -> None:
    """Raise Refused if the base runs other code than the stored run, or the candidate's code.

    Other code is another version of torch, or another commit of a repository that has the stored
    run's commit.
    here: the source tree that a base without a source tree runs.
    """
    if sides is None:
        return
    name, base = baseline.path.name, sides.base
    if sides.are_equal(here):
        raise Refused(
            f"the base equals this environment, so suspects of {name} would be compared with themselves; "
            "name the stored run's code or its interpreter with --base"
        )
    stored = baseline.torch_versions
    if sides.base_torch and stored != [sides.base_torch]:
        raise Refused(
            f"{name} was measured with torch {' and '.join(stored)}, but the base has {sides.base_torch}; "
            "name an interpreter with the stored run's torch with --base, or save a new baseline"
        )
    root, commit = base.root or here, baseline.commit.removesuffix("+")
    head = ["HEAD"] if baseline.commit != commit else []  # of a changed tree, only the commit is known
    try:
        changes = git(root, "diff", "--name-only", f"{commit}^{{commit}}", *head, "--", ".", *NOT_CODE)
    except OSError:
        return  # the commit may be of another repository
    if not commit or not changes:
        return
    if base.root is None:
        raise Refused(
            f"{name} was measured at commit {baseline.commit}, but this tree, which the base runs, "
            f"differs from it; check {commit} out elsewhere, and name that folder with --base"
        )
    held = commit_of(root).replace("+", " with changes")
    raise Refused(
        f"{name} was measured at commit {baseline.commit}, but --base {root} holds {held}; "
        f"check {commit} out there"
    )


def stored_sides(baseline: Baseline, here: Path, options: Options, cleanup: ExitStack) -> Sides:
    """Check the stored run's commit out, and return how to run it as the base of an A/B run.

    Raises Refused with the reason if the code cannot be run.
    here: the root of this source tree, which runs the candidate.
    cleanup: removes the git worktree when it is closed.
    """
    name, commit = baseline.path.name, baseline.commit
    if commit in ("", NO_COMMIT):
        raise Refused(f"{name} does not say which commit it measured")
    if commit.endswith("+"):
        raise Refused(f"{name} measured {commit.removesuffix('+')} with changes that were not committed")
    try:
        git(here, "cat-file", "-e", f"{commit}^{{commit}}")
    except OSError as error:
        raise Refused(f"commit {commit} of {name} is not in this repository ({error})") from error
    folder = here / ".ddpperf" / "base" / f"{commit}-{os.getpid()}"
    cleanup.callback(remove_worktree, here, folder)
    try:
        root = check_out(here, commit, folder)
    except OSError as error:
        raise Refused(f"commit {commit} of {name} cannot be checked out ({error})") from error
    torch = baseline.torch_versions[0]
    base = Side(name=BASE, python=_interpreter(baseline, torch), root=root)
    stored = {function for measured in baseline.measured.values() for function in measured.spec.functions}
    found = check_side(base, f"the code of {name}", options.device, [options.model, *sorted(stored)])
    found.require_root()
    if found.torch != torch:
        raise Refused(f"{name} measured torch {torch}, and {base.python} has {found.torch} today")
    return Sides(base=base, candidate=Side(name=CANDIDATE), spec_fields={}, found={BASE: found})


def _interpreter(baseline: Baseline, torch: str) -> str:
    """Return this interpreter if it has the stored run's torch, else the stored run's."""
    if torch.partition("+")[0] == version("torch").partition("+")[0]:
        return sys.executable
    stored = str(baseline.environment.get("executable", ""))
    if not os.access(stored, os.X_OK):
        where = f"its interpreter {stored} is gone" if stored else "it does not name its interpreter"
        raise Refused(f"{baseline.path.name} measured torch {torch}, and {where}")
    return stored
