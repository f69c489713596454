"""Lock the measured devices, because two test runs on one device disturb each other's times."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ddpperf.errors import Refused


class DeviceLock:
    """Locks the devices of a test run by locking one file for each device.

    The kernel releases the locks when the process ends. The files are in the folder
    $DDPPERF_LOCK_FOLDER, or in /tmp. They stay there and hold the process id of the last test run
    that measured on the device.
    """

    def __init__(self) -> None:
        self._files: list[IO[str]] = []

    def acquire(self, devices: Sequence[str]) -> None:
        """Lock all given devices, or raise Refused if another test run has locked one of them."""
        try:
            for device in devices:
                self._files.append(_lock(device))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock all devices that this test run has locked."""
        while self._files:
            file = self._files.pop()
            file.truncate(0)  # the next run's process id is not there yet when it is read
            file.close()


def _lock(device: str) -> IO[str]:
    path = Path(os.environ.get("DDPPERF_LOCK_FOLDER", "/tmp"), f"ddpperf-{device}.lock")
    try:
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            path.chmod(0o666)  # other users' runs write their process id, too
        file = path.open("r+")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(f"{os.getpid():<10}\n")  # always as long as the line that it replaces
        file.flush()
    except BlockingIOError:
        holder = file.read().strip()
        name = f"process {holder}" if holder else "another run"
        raise Refused(f"{device} is being measured by {name}; wait until that run ends, or stop it") from None
    except OSError as error:
        advice = "set DDPPERF_LOCK_FOLDER to a folder that you can write to"
        raise Refused(f"the lock file {path} cannot be written ({error.strerror}); {advice}") from error
    return file
