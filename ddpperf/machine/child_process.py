"""A process of its own that tries something and says what it found, and of which nothing stays."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
MOST_PRINTED = 2**26  # bytes, after which the process is killed: it may never stop
LOOK_SECONDS = 0.1
KEPT_BYTES = 2**20  # of what a process prints: it may never stop


@dataclass(frozen=True, kw_only=True)
class Ended:
    """status: of the process, negative for a signal. output, errors: what it printed, of which the last MiB is kept."""

    status: int
    output: str
    errors: str


def run_apart(command: Sequence[str], variables: Mapping[str, str], seconds: float) -> Ended:
    """Run `command` with `variables` beside this environment's; raises OSError, and subprocess.TimeoutExpired after `seconds`.

    Temporary files go where they are removed (torch leaves a cache), and whatever the process starts is killed with it. It ends
    with this one, and is killed when it has printed too much.
    """
    with tempfile.TemporaryDirectory(prefix="ddpperf-") as folder:
        environment = os.environ | dict(variables) | {"TMPDIR": folder}
        output, errors = (
            Path(folder) / "output",
            Path(folder) / "errors",
        )  # files: a child of its own would hold pipes open
        with output.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        last = time.monotonic() + seconds
        try:
            while process.poll() is None:
                if output.stat().st_size + errors.stat().st_size > MOST_PRINTED:
                    process.kill()
                elif time.monotonic() > last:
                    raise subprocess.TimeoutExpired(command, seconds)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        return Ended(status=status, output=end_of(output), errors=end_of(errors))


def _end_with_parent() -> None:
    """In the new process, which may be no Python."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_of(log: Path, begin: int = 0) -> str:
    """What a process has printed there, from a byte on, of which no more than KEPT_BYTES are read."""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - KEPT_BYTES))
        return file.read().decode(errors="replace")


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, waited for a moment: an interpreter closes its connection before its status is there."""
    try:
        status = process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "closed its connection before it answered, but runs on"
    if status < 0:
        known = {each.value: each.name for each in signal.Signals}
        return f"was killed by {known.get(-status, f'signal {-status}')}"
    return f"exited with status {status} before it answered"
