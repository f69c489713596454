"""Lock the measured devices, because two test runs on one device disturb each other's times."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ddpperf.errors import Refused

BRIEF_SECONDS = 15.0  # a test run waits so long for a brief holder, such as the doctor
POLL_SECONDS = 0.1


def lock_devices(devices: Sequence[str], is_brief: bool = False) -> contextlib.ExitStack:
    """Lock one file for each device of a test run, until the returned stack is closed.

    The kernel releases the locks when the process ends. The files are in the folder
    $DDPPERF_LOCK_FOLDER, or in /tmp. They stay there and hold the process id of the last test run
    that measured on the device. Raises Refused if another test run has locked one of the devices.
    is_brief: take a shared lock, as the doctor does. A test run waits some seconds for its end.
    """
    with contextlib.ExitStack() as locks:
        for device in devices:
            file = locks.enter_context(_lock(device, is_brief))
            locks.callback(file.truncate, 0)  # the next run's process id is not there yet when it is read
        return locks.pop_all()


def _lock(device: str, is_brief: bool) -> IO[str]:
    path = Path(os.environ.get("DDPPERF_LOCK_FOLDER", "/tmp"), f"ddpperf-{device}.lock")
    try:
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            path.chmod(0o666)  # other users' runs write their process id, too
        file = path.open("r+", encoding="utf-8", errors="replace")
        _lock_file(file, is_brief)
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


def _lock_file(file: IO[str], is_brief: bool) -> None:
    """Lock a file. Raises BlockingIOError if a test run holds it, or if brief holders do not end."""
    end = time.monotonic() + BRIEF_SECONDS
    while True:
        try:
            return fcntl.flock(file, (fcntl.LOCK_SH if is_brief else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_brief or time.monotonic() >= end:
                raise
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails at once if a test run holds the file
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(POLL_SECONDS)
