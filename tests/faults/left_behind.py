"""What faults leave behind: processes, files, shared memory and sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ddpperf.io.private_folders import SHARED_MEMORY
from tests.project import Marked

END_SECONDS = 2.0  # until the processes of a failed set must have ended
MOST_FILES = 3  # that are named


class LeftBehind:
    """Finds what has come since this object was made, and has not gone. It finds each thing once.

    Processes are those that the mark knows. Files are those in the mark's folder, in `folders` and in
    /dev/shm, which must be of this process alone. Sockets are those of this process and of the
    processes that are left.
    """

    def __init__(self, mark: Marked, folders: Sequence[Path] = ()) -> None:
        self._mark, self._folders = mark, (mark.folder, *folders)
        self._known = self._files()
        self._sockets = len(_sockets(os.getpid()))

    def found(self) -> tuple[str, ...]:
        """Return what is left after at most END_SECONDS, and kill the processes, for the next fault."""
        processes = self.running()
        sockets = [f"socket {socket}" for process in processes for socket in _sockets(process)]
        if (more := len(_sockets(os.getpid())) - self._sockets) > 0:
            sockets.append(f"sockets of this process: {more}")
        files = sorted(self._files() - self._known)
        self._known.update(files)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return (*(f"process {command}"[:80] for command in processes.values()), *_few(files), *sockets)

    def running(self) -> dict[int, str]:
        """Return the processes that are left after at most END_SECONDS, by process id."""
        end = time.monotonic() + END_SECONDS
        while (found := self._mark.processes()) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def _files(self) -> set[str]:
        found = {str(path) for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()
        for folder in self._folders:
            found |= {str(path) for path in files_in(folder)}
        return found | {str(path) for path in self._mark.folder.iterdir()}


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder, whatever a run removes meanwhile."""
    return [Path(inner, name) for inner, _, names in os.walk(folder) for name in names]


def _few(files: Sequence[str]) -> list[str]:
    """Return some of the files, and how many more there are."""
    more = len(files) - MOST_FILES
    return [*files[:MOST_FILES], *([f"{more} more files"] if more > 0 else [])]


def _sockets(process: int) -> list[str]:
    try:
        connections = psutil.Process(process).net_connections("all")
    except psutil.Error:
        return []
    return [str(found.laddr or found.type.name) for found in connections]
