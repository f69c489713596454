"""Read what a rank prints, and keep the beginning and the end, however long the output is."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
from pathlib import Path
from typing import BinaryIO

BEGINNING_BYTES = END_BYTES = 2**20
CHUNK_BYTES = 2**16
MOST_LOG_BYTES = BEGINNING_BYTES + 2 * END_BYTES
DRAIN_SECONDS = 0.2  # for what is left in the pipe of an ended rank


class RankOutput:
    """Reads what a rank and its children print, keeps the end in memory, and writes a log file.

    A thread reads the pipe, so that a rank waits while it prints faster than the thread reads. The
    log holds at most `MOST_LOG_BYTES`: a line replaces what was dropped between the beginning and
    the end. log: a new file for the output, or None. pipe: the writing end, for the rank; close it
    after the rank has started. problem: why the log could not be written, or "". printed: the number
    of bytes so far.
    """

    def __init__(self, log: Path | None) -> None:
        self.printed = 0
        self.problem = ""
        self._end = bytearray()  # at least the last END_BYTES
        self._lock = threading.Lock()
        with contextlib.ExitStack() as opened:  # closed again if one more cannot be opened
            self._log = None if log is None else opened.enter_context(_new_file(log))
            reader, writer = os.pipe()
            opened.callback(os.close, reader)
            self.pipe: BinaryIO = opened.enter_context(open(writer, "wb", buffering=0))
            self._stop = os.eventfd(0)
            opened.callback(os.close, self._stop)
            self._thread = threading.Thread(target=self._read, args=[reader], daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # there are too many threads
                raise OSError(errno.EAGAIN, str(error), "a thread") from error
            opened.pop_all()

    def _read(self, reader: int) -> None:
        ready = select.poll()
        ready.register(reader, select.POLLIN)
        ready.register(self._stop, select.POLLIN)
        while self._stop not in dict(ready.poll()) and (printed := os.read(reader, CHUNK_BYTES)):
            with self._lock:
                self.printed += len(printed)
                self._end += printed
                if len(self._end) > 2 * END_BYTES:
                    del self._end[:-END_BYTES]
            if self._log is not None:
                self._write(self._log, printed)
        os.close(reader)

    def _write(self, log: BinaryIO, printed: bytes) -> None:
        try:
            if log.tell() + len(printed) > MOST_LOG_BYTES:
                dropped = self.printed - BEGINNING_BYTES - END_BYTES
                log.seek(BEGINNING_BYTES)
                log.truncate()
                printed = b"\n(ddpperf dropped %d bytes here)\n" % dropped + self._end[-END_BYTES:]
            log.write(printed)
            log.flush()
        except OSError as error:
            self.problem = f"{log.name} cannot be written ({error.strerror})"
            with contextlib.suppress(OSError):  # the buffer cannot be written either
                log.close()
            self._log = None

    def since(self, begin: int) -> str:
        """Return the text that was printed after byte `begin`, but at most about its last MiB."""
        with self._lock:
            kept = self._end[max(0, len(self._end) - (self.printed - begin)) :]
        return kept.decode(errors="replace")

    def end(self) -> str:
        """Return the end of what an ended rank has printed."""
        self._thread.join(DRAIN_SECONDS)  # a child of the rank may keep the pipe open
        return self.since(0)

    def close(self) -> None:
        """Stop reading, once the rank and its children have ended."""
        if self._stop < 0:
            return
        self._thread.join(DRAIN_SECONDS)
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1
        if self._log is not None:
            with contextlib.suppress(OSError):  # of a network file system, after the last write
                self._log.close()


def _new_file(path: Path) -> BinaryIO:
    """Open a new file for writing in place of an earlier log; raise OSError for a symbolic link."""
    if path.is_symlink():
        why = "it is a symbolic link, which --worker-logs does not follow; remove it or name another folder"
        raise OSError(errno.ELOOP, why, str(path))
    path.unlink(missing_ok=True)  # not overwritten: a hard link would change another file, a FIFO block
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o666))
