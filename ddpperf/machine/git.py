"""The commit of a source tree, by git."""

from __future__ import annotations

import subprocess
from pathlib import Path

NO_COMMIT = "nogit"


def commit(root: Path) -> str:
    """Return the short commit of the tree at `root`, NO_COMMIT without git.

    "+" is added if the tree has changes or untracked files.
    """
    try:
        name = git(root, "rev-parse", "--short=9", "HEAD")
        return f"{name}+" if git(root, "status", "--porcelain") else name
    except (OSError, subprocess.SubprocessError):
        return NO_COMMIT


def git(root: Path, *arguments: str) -> str:
    """Return what a git command prints.

    Raises OSError or subprocess.SubprocessError if it fails.
    """
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
