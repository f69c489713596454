"""Whether the model that was asked for exists and can be trained, before anything is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest

import ddpperf
from ddpperf.specs import MODEL_VARIABLE, Model

CHECK_SECONDS = 120
TRAINED = "trained"  # the last that a check says, which only one that came to its end does


def check_model(model: str, batch_size: int) -> None:
    """Raise pytest.UsageError with one sentence unless the model can be trained: one that is not ours trains a step of
    `batch_size` rows on the CPU, in a process of its own, of which nothing stays."""
    if model in get_args(Model):
        return
    command = [sys.executable, "-m", "ddpperf.check_model", model, str(batch_size)]
    path = os.pathsep.join([str(Path(ddpperf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="ddpperf-") as folder:  # torch leaves a cache where temporary files go
        environment = os.environ | {MODEL_VARIABLE: model, "PYTHONPATH": path, "TMPDIR": folder}
        said, failed = Path(folder) / "said", Path(folder) / "failed"  # files: a child of the model's would hold pipes open
        with said.open("w") as stdout, failed.open("w") as stderr:
            trying = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)
        try:
            status = trying.wait(timeout=CHECK_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise pytest.UsageError(
                f"--model {model} did not train a step within {CHECK_SECONDS} s; try it by itself"
            ) from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trying.pid, signal.SIGKILL)
            trying.wait()
        lines = failed.read_text(errors="replace").strip().splitlines()
        trained = said.read_text(errors="replace").rstrip().endswith(TRAINED)
    if status == 1 and lines:  # as it exits with a sentence
        raise pytest.UsageError(f"--model: {lines[-1]}")
    if status or not trained:
        raise pytest.UsageError(f"--model {model} ended its process with status {status}; try it by itself")
