"""Run child processes that have limits on time and output and that die with their parent.

This module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
MAX_PRINTED_BYTES = 2**26  # a child that prints more is killed
KEPT_BYTES = 2**20  # the most that is read of what a process printed
POLL_SECONDS = 0.1


def run_child(
    command: Sequence[str],
    variables: Mapping[str, str],
    seconds: float,
    on_line: Callable[[str], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a child process with limits on its time and its output.

    variables: added to this process's environment. on_line: called with each line of the child's
    output while it runs. The child gets its own temporary folder. At the end, the folder is removed
    and all processes that the child started are killed. At most the last MiB of each output is
    returned. Raises OSError if the command cannot be started and subprocess.TimeoutExpired after
    `seconds`, counted from the last line for `on_line`. That exception has the output so far.
    """
    with tempfile.TemporaryDirectory(prefix="ddpperf-") as folder:
        # files instead of pipes: a grandchild would hold a pipe open
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        with (
            output.open("wb") as out,
            errors.open("wb") as err,
            output.open(encoding="utf-8", errors="replace") as reader,
        ):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | dict(variables) | {"TMPDIR": folder},
                start_new_session=True,  # Ctrl-C reaches this process alone
                preexec_fn=die_with_parent,
            )
            deadline, unread, running = time.monotonic() + seconds, "", True
            try:
                while running:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(POLL_SECONDS)
                    running = process.poll() is None
                    if on_line is not None:
                        *lines, unread = (unread + reader.read()).split("\n")
                        for line in lines:
                            on_line(line)
                            deadline = time.monotonic() + seconds
                    if output.stat().st_size + errors.stat().st_size > MAX_PRINTED_BYTES:
                        process.kill()
                    elif running and time.monotonic() > deadline:
                        raise subprocess.TimeoutExpired(command, seconds, end_of(output))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        return subprocess.CompletedProcess(command, status, end_of(output), end_of(errors))


def die_with_parent() -> None:
    """Ask the kernel to kill the current process when its parent process dies.

    The request stays in effect after an exec.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_of(log: Path, begin: int = 0) -> str:
    """Return the text of a log file from byte `begin` on, but at most its last MiB."""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - KEPT_BYTES))
        return file.read().decode(errors="replace")


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    """Return a phrase that says how a child process ended after it closed its connection.

    The exit status may come up to 5 seconds later.
    """
    try:
        return describe_status(process.wait(timeout=5))
    except subprocess.TimeoutExpired:
        return "closed its connection before it answered, but runs on"


def describe_status(status: int) -> str:
    """Return a phrase that explains a process's exit status, which is negative for a signal."""
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-status, f'signal {-status}')}"
    return f"exited with status {status} before it answered"
