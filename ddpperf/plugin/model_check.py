"""Whether the model that was asked for exists and can be trained, before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest

import ddpperf
from ddpperf.specs import MODEL_VARIABLE, Model

CHECK_SECONDS = 120


def check_model(model: str) -> None:
    """Raise pytest.UsageError with one sentence unless the model can be trained: one that is not ours trains a step on the
    CPU, in a process of its own."""
    if model in get_args(Model):
        return
    command = [sys.executable, "-m", "ddpperf.check_model", model]
    path = os.pathsep.join([str(Path(ddpperf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    try:
        with tempfile.TemporaryDirectory(prefix="ddpperf-") as folder:  # torch leaves a cache where temporary files go
            environment = os.environ | {MODEL_VARIABLE: model, "PYTHONPATH": path, "TMPDIR": folder}
            tried = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise pytest.UsageError(f"--model {model} did not train a step within {CHECK_SECONDS} s; try it by itself") from error
    if tried.returncode == 1 and (lines := tried.stderr.strip().splitlines()):  # as it exits with a sentence
        raise pytest.UsageError(f"--model: {lines[-1]}")
    if tried.returncode:
        raise pytest.UsageError(f"--model {model} ended its process with status {tried.returncode}; try it by itself")
