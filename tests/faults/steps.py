"""The training step of the faults, which does what a file requests as soon as the file is written.

Ranks import this module as a user's own function. The file that FAULTS_FILE names has a rank, a word
and the number of the first step that obeys.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

FILE_VARIABLE = "FAULTS_FILE"
SECONDS = 0.02  # of a step
BYTES = 2**26  # that a step allocates, but does not touch
FLOOD_BYTES = 2**28
RAISED = "put in by a test"
LINES = b"::error::a flood \x1b[31m of output\n" * 1000


def make(rank: int, world_size: int, batch_size: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a step that sleeps, allocates memory and sums a tensor over all ranks."""
    file = Path(os.environ[FILE_VARIABLE])
    steps = itertools.count()

    def step() -> Tensor:
        buffer = torch.empty(BYTES, dtype=torch.uint8)
        time.sleep(SECONDS)
        number = next(steps)
        with contextlib.suppress(FileNotFoundError):
            of_rank, word, first = file.read_text().split()
            if int(of_rank) == rank and number >= int(first):
                ACTS[word]()
        total = torch.ones(8) * len(buffer[:1])
        dist.all_reduce(total)
        return total.mean()

    return step


def write_request(file: Path, rank: int, word: str, first_step: int = 0) -> None:
    """Request that the steps of a rank do something, from a step on."""
    whole = file.with_suffix(".new")  # a step must not read half of it
    whole.write_text(f"{rank} {word} {first_step}")
    whole.replace(file)


def _raise() -> NoReturn:
    raise RuntimeError(RAISED)


def _hang() -> None:
    time.sleep(1e6)


def _exit() -> None:
    os._exit(0)


def _flood(text: bytes) -> None:
    for _ in range(FLOOD_BYTES // len(text)):
        os.write(sys.stdout.fileno(), text)
    _raise()


ACTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "hang": _hang,
    "exit": _exit,
    "flood-lines": lambda: _flood(LINES),
    "flood-line": lambda: _flood(b"x" * 2**15),
}
