"""Runs the command of a script, and ends all of its processes before it ends itself.

    python script_guard.py PARENT COMMAND

It ends them when the command has ended, at SIGTERM, and when its parent process dies. They first get a
SIGTERM, and are killed END_SECONDS later. At SIGUSR1 they first get a SIGABRT, at which Python prints
its stacks. Processes that left their session or lost their parents are found, too: the kernel makes
them children of this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK_SECONDS = 0.05
STACKS_SECONDS = 1.0
END_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36


def main(parent: str, command: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from ddpperf.machine.child_process import LIBC, PR_SET_PDEATHSIG, descendants_of, send_signal

    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        return

    def all_get(number: int) -> bool:
        """Send a signal to all descendants, and return whether there were any."""
        return send_signal(descendants_of(os.getpid()), number)

    def any_after(seconds: float) -> bool:
        """Wait until no descendant is left, and return whether there are any after some seconds."""
        end = time.monotonic() + seconds
        while (left := all_get(0)) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
        return left

    script = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL)
    while script.poll() is None and not asked:
        time.sleep(LOOK_SECONDS)
    if signal.SIGUSR1 in asked:
        all_get(signal.SIGABRT)
        any_after(STACKS_SECONDS)
    all_get(signal.SIGTERM)
    if any_after(END_SECONDS):
        all_get(signal.SIGKILL)
        any_after(END_SECONDS)
    sys.exit(script.returncode if (script.returncode or 0) >= 0 else 128 - script.returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
