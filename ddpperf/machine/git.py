"""Read the commit of a source tree with git."""

from __future__ import annotations

import subprocess
from pathlib import Path

NO_COMMIT = "nogit"


def commit(root: Path) -> str:
    """Return the short git commit of the source tree at `root`, or NO_COMMIT without git.

    "+" is added if the tree has changes or untracked files.
    """
    try:
        name = git(root, "rev-parse", "--short=9", "HEAD")
        return f"{name}+" if git(root, "status", "--porcelain") else name
    except (OSError, subprocess.SubprocessError):
        return NO_COMMIT


def git(root: Path, *arguments: str) -> str:
    """Run a git command on the source tree at `root` and return its output.

    Raises OSError or subprocess.SubprocessError if the command fails.
    """
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
