"""Whether another interpreter, root or environment can run ranks: asked in a process of its own before anything else."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ddpperf.machine.child_process import run_child
from ddpperf.workers.rank_process import Side

PROBE = Path(__file__).with_name("probe.py")
PROBE_SECONDS = 120
LEAST_PYTHON, LEAST_TORCH = "3.11", "2.11"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the probe says: versions, the folders that modules come from, or which module cannot be imported and why."""

    python: str
    torch: str = ""
    cuda: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    torchvision: bool = True
    missing: str = ""
    why: str = ""


def check_side(side: Side, asked: str, device: str, model: str) -> Found:
    """What the side has; raises pytest.UsageError unless its ranks can start, and its root has something that they load.

    asked: how the options name it.
    """
    found = _probe(side, asked, model)
    if _release(found.python) < _release(LEAST_PYTHON):
        raise pytest.UsageError(
            f"{asked} is Python {found.python}, ddpperf needs {LEAST_PYTHON} or newer; name a newer interpreter"
        )
    if found.torch and _release(found.torch) < _release(LEAST_TORCH):
        raise pytest.UsageError(
            f"{asked} has torch {found.torch}, ddpperf needs {LEAST_TORCH} or newer; install one there"
        )
    if found.missing:
        raise pytest.UsageError(
            f"{asked} cannot import {found.missing}, as its ranks must ({found.why}); install it there"
        )
    if device == "cuda" and found.cuda is None:
        raise pytest.UsageError(
            f"{asked} has torch {found.torch}, which has no CUDA, for --device cuda; install one that has, or pass --device cpu"
        )
    if side.root is not None and str(side.root) not in found.folders.values():
        places = ", ".join(f"{name} from {folder}" for name, folder in found.folders.items())
        raise pytest.UsageError(
            f"{asked} holds nothing that a rank loads, found {places}; name a checkout of one of them"
        )
    return found


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _probe(side: Side, asked: str, model: str) -> Found:
    """What the side's interpreter has, asked in a process of its own, of which nothing stays."""
    command = [side.python, str(PROBE), model, str(side.package)]
    try:
        ended = run_child(command, side.variables(), PROBE_SECONDS)
    except OSError as error:
        raise pytest.UsageError(
            f"{asked} cannot be started ({error.strerror}); name a Python interpreter"
        ) from error
    except subprocess.TimeoutExpired as error:
        sentence = f"{asked} did not import torch and the model within {PROBE_SECONDS} s; try it by itself"
        raise pytest.UsageError(sentence) from error
    answers = ended.output.splitlines()
    lines = [line[:200] for line in ended.errors.splitlines() if line[:1].strip()]
    reason = "".join(
        f" ({line})" for line in (lines[-1:] if answers else lines[:1])
    )  # what is no Python says it first
    return _read_answers(asked, answers, f"ended with status {ended.status}{reason}")


def _read_answers(asked: str, answers: Sequence[str], end: str) -> Found:
    """What the probe printed, a line before the imports and one after; `end` says how its process ended."""
    found = []
    for line in answers:
        with contextlib.suppress(TypeError, ValueError):  # what a wrapper around it says
            found.append(Found(**json.loads(line)))
    if not found:
        raise pytest.UsageError(
            f"{asked} is no Python {LEAST_PYTHON} or newer, it {end}; name a Python interpreter"
        )
    if len(found) == 1 and _release(found[0].python) >= _release(LEAST_PYTHON):
        raise pytest.UsageError(f"{asked} {end} while it imported torch and the model; try it by itself")
    return found[-1]
