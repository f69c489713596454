"""Read the commit of a source tree with git."""

from __future__ import annotations

import subprocess
from pathlib import Path

NO_COMMIT = "nogit"


def commit(root: Path) -> str:
    """Return the short git commit of the source tree at `root`, or NO_COMMIT without git.

    "+" is added if the tree has changes or untracked files.
    """
    name, changes = git(root, "rev-parse", "--short=9", "HEAD"), git(root, "status", "--porcelain")
    if name is None or changes is None:
        return NO_COMMIT
    return f"{name}+" if changes else name


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command on the source tree at `root`, or None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()
