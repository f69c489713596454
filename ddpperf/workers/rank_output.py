"""Read what a process prints, and keep the beginning and the end, however long the output is."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path
from typing import BinaryIO

BEGINNING_BYTES = END_BYTES = 2**20
CHUNK_BYTES = 2**16
DRAIN_SECONDS = 0.2  # for what is left in the pipe of an ended rank


class RankOutput:
    """Reads what a rank and its children print, keeps the end in memory, and writes a log file.

    A thread reads, so that a rank waits while it prints faster than the thread reads. reader: a pipe
    or a socket, which this object closes. log: a file that replaces an earlier one, or None; it gets
    the first BEGINNING_BYTES at once, and the last END_BYTES when the output is closed. problem: why
    the log could not be written, or "". printed: the number of bytes so far.
    """

    def __init__(self, reader: int, log: Path | None = None) -> None:
        self.printed = 0
        self.problem = ""
        self._end = bytearray()  # at least the last END_BYTES
        self._lock = threading.Lock()
        self._log: BinaryIO | None = None
        if log is not None:
            log.unlink(missing_ok=True)  # not overwritten: a FIFO would block
            self._log = log.open("xb", buffering=0)
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._read, args=[reader], daemon=True)
        self._thread.start()

    def _read(self, reader: int) -> None:
        ready = select.poll()
        ready.register(reader, select.POLLIN)
        ready.register(self._stop, select.POLLIN)
        with contextlib.suppress(OSError):  # a connection was cut
            while self._stop not in dict(ready.poll()) and (printed := os.read(reader, CHUNK_BYTES)):
                self._write(printed[: max(0, BEGINNING_BYTES - self.printed)])
                with self._lock:
                    self.printed += len(printed)
                    self._end += printed
                    if len(self._end) > 2 * END_BYTES:
                        del self._end[:-END_BYTES]
        os.close(reader)

    def _write(self, printed: bytes | bytearray) -> None:
        if self._log is None or self.problem:
            return
        try:
            while printed:
                printed = printed[self._log.write(printed) :]
        except OSError as error:
            self.problem = f"{self._log.name} cannot be written ({error.strerror})"

    def since(self, begin: int) -> str:
        """Return the text that was printed after byte `begin`, but at most about its last MiB."""
        with self._lock:
            kept = self._end[max(0, len(self._end) - (self.printed - begin)) :]
        return kept.decode(errors="replace")

    def end(self) -> str:
        """Return the end of what an ended process has printed."""
        self.wait(DRAIN_SECONDS)  # a child of the process may keep the pipe open
        return self.since(0)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until all processes that could print have ended."""
        self._thread.join(seconds)

    def close(self) -> None:
        """Stop reading, and complete the log, once the process and its children have ended."""
        if self._stop < 0:
            return
        self.wait(DRAIN_SECONDS)
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1
        if self._log is not None:
            if (dropped := self.printed - BEGINNING_BYTES - END_BYTES) > 0:
                self._write(b"\n(ddpperf dropped %d bytes here)\n" % dropped)
            if (rest := min(END_BYTES, self.printed - BEGINNING_BYTES)) > 0:
                self._write(self._end[-rest:])
            self._log.close()
