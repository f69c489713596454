"""Training steps that tests bring to ranks: one is quiet, the other keeps a core busy between rounds."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ddpperf.specs import FUNCTIONS_VARIABLE, CustomStepSpec


def quiet(*, rank: int, world_size: int, batch_size: int, device: torch.device) -> Callable[[], Tensor]:
    del rank, world_size, batch_size
    loss = torch.zeros(1, device=device)

    def step() -> Tensor:
        time.sleep(0.005)
        return loss

    return step


def busy(*, rank: int, world_size: int, batch_size: int, device: torch.device) -> Callable[[], Tensor]:
    """Rank 0 starts a thread that spins, and the others start a process that spins."""
    if rank == 0:
        threading.Thread(target=_spin, daemon=True).start()
    else:
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    return quiet(rank=rank, world_size=world_size, batch_size=batch_size, device=device)


def _spin() -> None:
    while True:
        pass


ALLOWED = {FUNCTIONS_VARIABLE: f"{__name__}:quiet,{__name__}:busy"}  # for ranks that may call these functions


def step_of(kind: str) -> CustomStepSpec:
    """Return the spec of one of these steps on two ranks."""
    return CustomStepSpec(function=f"{__name__}:{kind}", world_size=2, per_rank_batch_size=1)
