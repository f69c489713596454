"""Temporary folders and files that do not outlive the processes that use them.

Each process that makes or uses a temporary folder locks the folder (flock). The kernel releases the
lock when the last of these processes ends, even by SIGKILL. The next run removes folders and files
that no process locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from ddpperf.errors import Refused

PREFIX = "ddpperf_"  # of private folders; older versions made folders without locks, called ddpperf-
RANDOM_LETTERS = 8  # that tempfile appends to a name
SHARED_MEMORY = Path("/dev/shm")
SHORT_ROOT = "/tmp"
# The socket of a loader's fork server is called ROOT/ddpperf_12345678/A123/pymp-12345678/listener-12345678.
MOST_ROOT_BYTES = 107 - 52  # a socket's path has at most 107 bytes


class PrivateFolder:
    """A new temporary folder that no other user can read. `remove` removes it.

    The next process that makes a private folder in the same place removes the folders that killed
    processes left. root: where to make it, by default in `temporary_root`. Raises Refused if
    it cannot be made there, and OSError if it cannot be made in `root`.
    """

    def __init__(self, root: str | None = None) -> None:
        parent = root or temporary_root()
        remove_abandoned_folders(parent)
        try:
            self.path, self._held = _make_held(lambda: Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
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

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.remove()


def temporary_root() -> str:
    """Return the folder for private folders: that of $TMPDIR, unless its path is too long for sockets.

    Raises Refused if /tmp cannot be used instead.
    """
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) <= MOST_ROOT_BYTES:
        return root
    if os.access(SHORT_ROOT, os.W_OK | os.X_OK):
        return SHORT_ROOT
    needs = f"sockets need a temporary folder whose path has at most {MOST_ROOT_BYTES} bytes"
    found = f"found TMPDIR={root[:100]}, and {SHORT_ROOT} cannot be written"
    raise Refused(f"{needs}, {found}; set TMPDIR to a shorter path")


def hold(path: Path) -> int:
    """Open and lock a folder or a file until the returned file descriptor is closed.

    The end of this process closes it, too.
    """
    held = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # such as a network file system without locks
        fcntl.flock(held, fcntl.LOCK_SH)
    return held


def _make_held(make: Callable[[], Path]) -> tuple[Path, int]:
    """Make and lock a folder or a file; start again if another process removes it before the lock."""
    while True:
        path = make()
        try:
            held = hold(path)
        except FileNotFoundError:
            continue
        if _is_same(held, path):
            return path, held
        os.close(held)


def _is_same(opened: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(opened), path.lstat())
    return False


def remove_folder(folder: Path) -> None:
    """Remove a private folder, and the semaphores that ranks named after it (workers/bootstrap.py)."""
    shutil.rmtree(folder, ignore_errors=True)
    _remove_shared((f"sem.{folder.name}-",))


def remove_tensors(processes: Iterable[int]) -> None:
    """Remove the shared memory that processes, which have ended, left of torch's tensors.

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
    """Remove the private folders of this user that no process holds any more."""
    for folder in Path(root).glob(PREFIX + "?" * RANDOM_LETTERS):
        with _abandoned(folder, stat.S_ISDIR) as is_abandoned:
            if is_abandoned:
                remove_folder(folder)


@contextlib.contextmanager
def _abandoned(path: Path, is_kind: Callable[[int], bool]) -> Iterator[bool]:
    """Yield whether no process locks a file or folder of this user; keep it locked meanwhile."""
    opened = -1
    try:
        found = path.lstat()
        if found.st_uid == os.getuid() and is_kind(found.st_mode):
            opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield opened >= 0 and _is_same(opened, path)
    finally:
        if opened >= 0:
            os.close(opened)


@contextlib.contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """Make a temporary file beside `path` and yield its path, to write it and to rename it to `path`.

    The file is removed at the end, unless it was renamed. Files that killed processes left for
    `path` are removed first.
    """
    prefix = f".{path.name}."
    for left in path.parent.glob(glob.escape(prefix) + "?" * RANDOM_LETTERS):
        with _abandoned(left, stat.S_ISREG) as is_abandoned:
            if is_abandoned:
                left.unlink(missing_ok=True)

    def make() -> Path:
        # Not by the module tempfile, whose files only their owner can read, whatever the umask is
        temporary = path.with_name(prefix + secrets.token_hex(RANDOM_LETTERS // 2))
        temporary.open("xb").close()
        return temporary

    temporary, held = _make_held(make)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        os.close(held)
