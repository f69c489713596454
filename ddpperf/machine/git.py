"""Read the commit of a source tree with git, and check out other commits of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ddpperf.machine.child_process import run_child

NO_COMMIT = "nogit"
CHECKOUT_SECONDS = 60
# What stored runs are kept in or made into: changes here do not change what is measured.
NOT_CODE = [
    f":(exclude){path}"
    for path in ("perf/baselines", "perf/thresholds.toml", "docs", "README.md", "CHANGELOG.md")
]


def commit(root: Path) -> str:
    """Return the short git commit of the source tree at `root`, or NO_COMMIT without git.

    "+" is added if a tracked file has changed, except those in `NOT_CODE`. Untracked files do not
    count, as in `git describe --dirty`.
    """
    name = git(root, "rev-parse", "--short=9", "HEAD")
    changes = git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_CODE)
    if name is None or changes is None:
        return NO_COMMIT
    return f"{name}+" if changes else name


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command on the source tree at `root`, or None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(ended.stdout).strip()


def check_out(root: Path, commit: str, folder: Path) -> Path:
    """Check a commit out in a new git worktree, and return the folder in it that `root` is here.

    Raises OSError with git's reason if that fails. `remove_worktree` removes the folder again.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = ["git", "-C", str(root), "worktree", "add", "--force", "--detach", str(folder), commit]
    try:
        ended = run_child(command, {}, CHECKOUT_SECONDS)  # which also kills what git started
    except subprocess.TimeoutExpired as error:
        remove_worktree(root, folder)
        raise OSError(f"git took longer than {CHECKOUT_SECONDS} s") from error
    if ended.returncode:
        remove_worktree(root, folder)
        raise OSError((ended.stderr.strip().splitlines() or ["git failed"])[-1])
    return folder / (git(root, "rev-parse", "--show-prefix") or "")


def remove_worktree(root: Path, folder: Path) -> None:
    """Remove a git worktree and its files, as far as they exist."""
    git(root, "worktree", "remove", "--force", "--force", str(folder))  # twice: git may have left a lock
    shutil.rmtree(folder, ignore_errors=True)
    git(root, "worktree", "prune")
