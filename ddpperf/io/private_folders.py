"""Temporary folders that do not outlive the processes that use them.

Each process that makes or uses a temporary folder locks the folder (flock). The kernel releases the
lock when the last of these processes ends, even by SIGKILL. The next run removes folders that no
process locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ddpperf.errors import Refused

PREFIX = "ddpperf_"  # of private folders; older versions made folders without locks, called ddpperf-
RANDOM_LETTERS = 8
SHARED_MEMORY = Path("/dev/shm")
SHORT_ROOT = "/tmp"
# The socket of a loader's fork server is called ROOT/ddpperf_12345678/A123/pymp-12345678/listener-12345678.
MOST_ROOT_BYTES = 107 - 52  # a socket's path has at most 107 bytes


class PrivateFolder:
    """A new temporary folder that no other user can read. `remove` removes it.

    The next process that makes a private folder in the same place removes the folders that killed
    processes left. root: where to make it, by default in `temporary_root`. Raises Refused if it
    cannot be made there, and OSError if it cannot be made in `root`.
    """

    def __init__(self, root: str | None = None) -> None:
        parent = root or temporary_root()
        remove_abandoned_folders(parent)
        try:
            unlocked = Path(tempfile.mkdtemp(prefix=f"new_{PREFIX}", dir=parent))
            self._held = hold(unlocked)
            # Only under this name may another process take the folder for an abandoned one.
            self.path = unlocked.rename(Path(parent, PREFIX + secrets.token_hex(RANDOM_LETTERS // 2)))
        except OSError as error:
            if root is not None:
                raise
            why = f"a temporary folder cannot be made in {parent[:100]} ({error.strerror})"
            raise Refused(f"{why}; free space there, or set TMPDIR to another folder") from error

    def remove(self) -> None:
        """Remove the folder, and the semaphores that are named after it. May be called again."""
        remove_folder(self.path)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def temporary_root() -> str:
    """Return the folder for private folders: that of $TMPDIR, unless its path is too long for sockets."""
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= MOST_ROOT_BYTES else SHORT_ROOT


def hold(folder: Path) -> int:
    """Lock a folder until the returned file descriptor is closed or this process ends."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # such as a network file system without locks
        fcntl.flock(held, fcntl.LOCK_SH)
    return held


def remove_folder(folder: Path) -> None:
    """Remove a private folder, and the semaphores that ranks named after it (workers/rank_entry.py)."""
    shutil.rmtree(folder, ignore_errors=True)
    _remove_shared((f"sem.{folder.name}-",))


def remove_tensors(processes: Iterable[int]) -> None:
    """Remove the shared memory of torch's tensors that processes left behind when they ended.

    torch names shared memory after the process that makes it. The process removes the name at once,
    unless it is killed.
    """
    _remove_shared(tuple(f"torch_{process}_" for process in processes))


def _remove_shared(prefixes: tuple[str, ...]) -> None:
    with contextlib.suppress(OSError):  # there is no /dev/shm
        for name in os.listdir(SHARED_MEMORY):
            if name.startswith(prefixes):
                with contextlib.suppress(OSError):
                    (SHARED_MEMORY / name).unlink()


@functools.cache  # once in a process
def remove_abandoned_folders(root: str) -> None:
    """Remove the private folders that no process holds any more."""
    for folder in Path(root).glob(PREFIX + "?" * RANDOM_LETTERS):
        with contextlib.suppress(OSError):  # of another user, removed meanwhile, or held by a process
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder)
            finally:
                os.close(held)
