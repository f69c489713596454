"""Check the code of a stored run out as the base of an A/B run, or check the base that the user names."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.io.private_folders import PrivateFolder
from ddpperf.machine.git import (
    NO_COMMIT,
    NOT_CODE,
    check_out,
    git,
    is_shallow,
    remove_lost_worktrees,
    remove_worktree,
)
from ddpperf.machine.git import commit as commit_of
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.results.stored_runs import Baseline
from ddpperf.workers.interpreter import Side, check_side

SAVE_ANOTHER = "store a new baseline with --benchmark-save=NAME"


def require_stored_code(baseline: Baseline, sides: Sides, here: Path) -> None:
    """Raise Refused if the base's code is not that of the stored run, or is that of the candidate.

    A repository that lacks the stored run's commit is not checked. here: the source tree that a base
    without a source tree runs.
    """
    name, stored = baseline.path.name, baseline.torch_versions
    same = sides.base.environment == sides.candidate.environment and not sides.spec_fields
    if same and sides.have_equal_code(here):
        right = f"the code or the interpreter of {name}"
        raise Refused(f"--base names the code of this run; name {right}, or leave --base out")
    if (base := sides.found.get(BASE)) is not None and stored != [base.torch]:
        measured = f"{name} was measured with torch {' and '.join(stored)}"
        advice = "name an interpreter with the stored run's torch with --base, or save a new baseline"
        raise Refused(f"{measured}, but the base has {base.torch}; {advice}")
    root, commit = sides.base.root or here, baseline.commit.removesuffix("+")
    head = ["HEAD"] if baseline.commit != commit else []  # of a changed tree, only the commit is known
    try:
        changes = git(root, "diff", "--name-only", f"{commit}^{{commit}}", *head, "--", ".", *NOT_CODE)
    except OSError:
        return  # the commit may be of another repository
    if commit and changes:
        held = commit_of(root).replace("+", " with changes")
        runs = f"the base runs {root}, which holds {held}"
        advice = f"check {commit} out elsewhere, and name that folder with --base"
        raise Refused(f"{name} was measured at commit {baseline.commit}, but {runs}; {advice}")


def stored_sides(baseline: Baseline, here: Path, options: Options, cleanup: ExitStack) -> Sides:
    """Check the stored run's commit out, and return how to run it as the base of an A/B run.

    Raises Refused with the reason if the code cannot be run. here: the root of this source tree, which
    runs the candidate. cleanup: removes the git worktree when it is closed.
    """
    name, commit, torch = baseline.path.name, baseline.commit, baseline.torch_versions[0]
    if commit in ("", NO_COMMIT):
        raise Refused(f"{name} does not say which commit it measured; {SAVE_ANOTHER} in a git repository")
    if commit.endswith("+"):
        what = f"{name} measured {commit.removesuffix('+')} with changes that were not committed"
        raise Refused(f"{what}; commit your code, then {SAVE_ANOTHER}")
    folder = here / ".ddpperf" / "base"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        private = PrivateFolder(str(folder))
        cleanup.callback(private.remove)
        remove_lost_worktrees(here, folder)
        cleanup.callback(remove_worktree, here, private.path / commit)
        root = check_out(here, commit, private.path / commit)
    except OSError as error:
        what = f"commit {commit} of {name} cannot be checked out ({error})"
        advice = (
            "git fetch --unshallow" if is_shallow(here) else "repair this, then run the same command again"
        )
        raise Refused(f"{what}; {advice}") from error
    python = sys.executable
    if torch.partition("+")[0] != version("torch").partition("+")[0]:
        python = str(baseline.environment.get("executable", ""))
        if not os.access(python, os.X_OK):
            what = f"{name} measured torch {torch}, and its interpreter {python or '(not stored)'} is gone"
            raise Refused(f"{what}; {SAVE_ANOTHER}")
    base = Side(name=BASE, python=python, root=root)
    stored = {function for measured in baseline.measured.values() for function in measured.spec.functions}
    found = check_side(base, f"the code of {name}", options.device, [options.model, *sorted(stored)])
    if found.torch != torch:
        what = f"{name} measured torch {torch}, and {base.python} has {found.torch} today"
        raise Refused(f"{what}; {SAVE_ANOTHER}")
    return Sides(base=base, candidate=Side(name=CANDIDATE), spec_fields={}, found={BASE: found})
