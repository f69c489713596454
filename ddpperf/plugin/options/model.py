"""Whether the model that was asked for exists and can be trained, before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import ddpperf
from ddpperf.machine.child_process import run_child
from ddpperf.specs import MODEL_VARIABLE, Model

CHECK_SECONDS = 120
TRAINED = "trained"  # the last that a check says, which only one that came to its end does


def check_model(model: str, batch_size: int) -> None:
    """Raise pytest.UsageError with one sentence unless the model can be trained: one that is not ours trains a step of
    `batch_size` rows on the CPU, in a process of its own, of which nothing stays."""
    if model in get_args(Model):
        return
    command = [sys.executable, "-m", "ddpperf.training.check_model", model, str(batch_size)]
    path = os.pathsep.join([str(Path(ddpperf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    try:
        ended = run_child(command, {MODEL_VARIABLE: model, "PYTHONPATH": path}, CHECK_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise pytest.UsageError(
            f"--model {model} did not train a step within {CHECK_SECONDS} s; try it by itself"
        ) from error
    lines = ended.errors.strip().splitlines()
    if ended.status == 1 and lines:  # as it exits with a sentence
        raise pytest.UsageError(f"--model: {lines[-1]}")
    if ended.status or not ended.output.rstrip().endswith(TRAINED):
        raise pytest.UsageError(
            f"--model {model} ended its process with status {ended.status}; try it by itself"
        )
