"""A process of its own that tries something and says what it found, and of which nothing stays."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LARGEST_FILE = 2**28  # bytes that the process may write into one
KEPT_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Ended:
    """status: of the process, negative for a signal. output, errors: what it printed, of which the last MiB is kept."""

    status: int
    output: str
    errors: str


def run_apart(command: Sequence[str], variables: Mapping[str, str], seconds: float) -> Ended:
    """Run `command` with `variables` beside this environment's; raises OSError, and subprocess.TimeoutExpired after `seconds`.

    Temporary files go where they are removed (torch leaves a cache), and whatever the process starts is killed with it.
    """
    with tempfile.TemporaryDirectory(prefix="ddpperf-") as folder:
        environment = os.environ | dict(variables) | {"TMPDIR": folder}
        output, errors = Path(folder) / "output", Path(folder) / "errors"  # files: a child of its own would hold pipes open
        with output.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))  # what never stops printing
        try:
            status = process.wait(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Ended(status=status, output=_end(output), errors=_end(errors))


def _end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - KEPT_BYTES))
        return file.read().decode(errors="replace")
