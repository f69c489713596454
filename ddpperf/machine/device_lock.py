"""Lock the measured devices, because two test runs on one device disturb each other's times."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from ddpperf.errors import Refused


def lock_devices(devices: Sequence[str]) -> contextlib.ExitStack:
    """Lock one file for each device of a test run, until the returned stack is closed.

    The kernel releases the locks when the process ends. The files are in the folder
    $DDPPERF_LOCK_FOLDER, or in /tmp. They stay there and hold the process id of the last run that
    used the device. Raises Refused if another process has locked one of the devices.
    """
    with contextlib.ExitStack() as locks:
        for device in devices:
            path = Path(os.environ.get("DDPPERF_LOCK_FOLDER", "/tmp"), f"ddpperf-{device}.lock")
            try:
                with contextlib.suppress(FileExistsError):
                    path.touch(exist_ok=False)
                    path.chmod(0o666)  # other users' runs write their process id, too
                file = locks.enter_context(path.open("r+", encoding="utf-8", errors="replace"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(f"{os.getpid():<10}\n")  # always as long as the line that it replaces
                file.flush()
            except BlockingIOError:
                holder = file.read().strip()
                name = f"process {holder}" if holder else "another run"
                advice = "wait until that run ends, or stop it"
                raise Refused(f"{device} is being measured by {name}; {advice}") from None
            except OSError as error:
                advice = "set DDPPERF_LOCK_FOLDER to a folder that you can write to"
                what = f"the lock file {path} cannot be written ({error.strerror})"
                raise Refused(f"{what}; {advice}") from error
        return locks.pop_all()
