"""One run at a time on a device: two would time each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest


class DeviceLock:
    """Holds the named devices from `acquire` to `release`, or to the process' end: the kernel sees to that."""

    def __init__(self) -> None:
        self._held: list[tuple[Path, int]] = []

    def acquire(self, devices: Sequence[str]) -> None:
        """Take all devices or none; raises pytest.UsageError that names the run which holds one."""
        try:
            for device in sorted(devices):
                path = Path(tempfile.gettempdir()) / f"ddpperf-{device}.lock"
                self._held.append((path, _lock(path, device)))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        for path, descriptor in self._held:
            with contextlib.suppress(OSError):  # somebody else's file in a sticky folder
                path.unlink()
            os.close(descriptor)
        self._held = []


def _lock(path: Path, device: str) -> int:
    """A descriptor that holds the lock on `path`, with this process' id inside."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise pytest.UsageError(f"the lock of {device} cannot be opened at {path}: {error.strerror}; remove it") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown"
            os.close(descriptor)
            raise pytest.UsageError(
                f"{device} is being measured by another run (process {holder}); wait until it ends, or stop it"
            ) from None
        # The last holder removes the file: make sure that the locked one is still the one at `path`.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        os.close(descriptor)
