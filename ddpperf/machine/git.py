"""Read the commit of a source tree with git, and check out other commits of it.

Git runs without the user's hooks and without variables that redirect it: inside a pre-commit hook,
GIT_INDEX_FILE names the index of the user's commit, which a checkout would overwrite.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from ddpperf.machine.child_process import run_child

NO_COMMIT = "nogit"
READ_SECONDS = 10
CHECKOUT_SECONDS = 60
# What stored runs are kept in or made into: changes here do not change what is measured.
NOT_CODE = [
    f":(exclude){path}"
    for path in ("perf/baselines", "perf/thresholds.toml", "docs", "README.md", "CHANGELOG.md")
]
# Variables that say how git works (the user's settings, keys, certificates), not on what.
KEPT_VARIABLES = (
    *("GIT_ASKPASS", "GIT_CONFIG_", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH", "GIT_LFS_"),
    *("GIT_SSH", "GIT_SSL"),
)
WITHOUT_HOOKS = ["-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false"]


def commit(root: Path) -> str:
    """Return the short git commit of the source tree at `root`, or NO_COMMIT without git.

    "+" is added if a tracked file has changed, except those in `NOT_CODE`. Untracked files do not
    count, as in `git describe --dirty`.
    """
    try:
        return _described(root)
    except OSError:
        return NO_COMMIT


def _described(root: Path) -> str:
    name = git(root, "rev-parse", "--short=9", "HEAD")
    changes = git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_CODE)
    return f"{name}+" if changes or _hidden_change(root) else name


def _hidden_change(root: Path) -> bool:
    """Return whether a tracked file has changed that `git status` leaves out."""
    with contextlib.suppress(OSError):  # such as a list that is too long
        listed = git(root, "ls-files", "-v", "-s", "--", ".", *NOT_CODE)
        # "S" stands also for files that a sparse checkout leaves out
        left_out = re.findall(r"^[Sa-z] \d+ (\w+) \d\t(.+)$", listed, re.MULTILINE)
        there = [(digest, path) for digest, path in left_out if (root / path).is_file()]
        return any(git(root, "hash-object", "--", path) != digest for digest, path in there)
    return False


def without_commit(root: Path) -> str:
    """Return git's reason why a source tree has no commit, or an empty string if it has one."""
    try:
        _described(root)
    except OSError as error:
        return str(error)
    return ""


def repository_of(folder: Path) -> Path:
    """Return the root of the repository or worktree that has a folder, or the folder itself without one."""
    folder = folder.resolve()
    return next((path for path in (folder, *folder.parents) if (path / ".git").exists()), folder)


def git(root: Path, *arguments: str, seconds: float = READ_SECONDS) -> str:
    """Run a git command on the source tree at `root`, and return what it prints.

    Raises OSError with git's reason if the command fails or takes longer than `seconds`.
    """
    redirecting = {
        name for name in os.environ if name.startswith("GIT_") and not name.startswith(KEPT_VARIABLES)
    }
    # Without locks, or `git status` would lock the index, and a commit of the user fail.
    variables = dict.fromkeys(redirecting) | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C.UTF-8"}
    try:  # in a session of its own, so that what git has started ends, too
        ended = run_child(["git", "-C", str(root), *WITHOUT_HOOKS, *arguments], variables, seconds)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"git took longer than {seconds} s") from error
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"git {arguments[0]} failed"]
        raise OSError(next((line for line in lines if line.startswith("fatal: ")), lines[-1]))
    return ended.stdout.strip()


def is_shallow(root: Path) -> bool:
    """Return whether a repository lacks older commits, as a clone with --depth does."""
    with contextlib.suppress(OSError):
        return git(root, "rev-parse", "--is-shallow-repository") == "true"
    return False


def check_out(root: Path, commit: str, folder: Path) -> Path:
    """Check a commit out in a new git worktree, and return the folder there that corresponds to `root`.

    Raises OSError with git's reason if that fails. `remove_worktree` removes the folder again, also
    what a failure has left of it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    git(root, "worktree", "add", "--force", "--detach", str(folder), commit, seconds=CHECKOUT_SECONDS)
    return folder / git(root, "rev-parse", "--show-prefix")


def remove_lost_worktrees(root: Path, below: Path) -> None:
    """Make git forget the worktrees below a folder whose files are gone, as killed runs leave them."""
    for line in git(root, "worktree", "list", "--porcelain").splitlines():
        path = Path(line.removeprefix("worktree "))
        if path.is_relative_to(below) and not path.exists():
            remove_worktree(root, path)


def remove_worktree(root: Path, folder: Path) -> None:
    """Remove a git worktree and its files, as far as they exist.

    Other worktrees whose files are missing stay: they may lie on a drive that is not mounted, and
    `git worktree prune` would forget them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # there is no such worktree; twice, as git may have left a lock
        git(root, "worktree", "remove", "--force", "--force", str(folder))
