"""Whether the model that was asked for exists and can be trained, before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import ddpperf
from ddpperf.specs import MODEL_VARIABLE, Model, require_model

CHECK_SECONDS = 120


def check_model(model: str) -> str:
    """The model's name, if it can be trained: one that is not ours trains a step on the CPU, in a process of its own.

    Raises pytest.UsageError with one sentence if it cannot.
    """
    try:
        require_model(model)
    except ValueError as error:
        raise pytest.UsageError(f"--model: {error}") from error
    if model in get_args(Model):
        return model
    command = [sys.executable, "-m", "ddpperf.check_model", model]
    path = os.pathsep.join([os.getcwd(), str(Path(ddpperf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {MODEL_VARIABLE: model, "PYTHONPATH": path}
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise pytest.UsageError(f"--model {model} did not train a step within {CHECK_SECONDS} s; try it by itself") from error
    if tried.returncode:
        lines = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
        raise pytest.UsageError(f"--model: {lines[-1]}")
    return model
