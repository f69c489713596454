"""Training steps that fail on purpose, which tests bring to ranks as users bring steps of their own.

A step fails in the last rank, when a round runs it first. The other ranks then wait in a barrier.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.specs import FUNCTIONS_VARIABLE, CustomStepSpec
from ddpperf.workers.rank_commands import WARMUP_ITERATIONS

PURPOSE = "fails on purpose"  # what the rank prints before, or raises


def kill_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave_rank() -> None:
    os._exit(0)  # sys.exit would also end the process group, where gloo's threads may abort


def raise_error() -> None:
    raise RuntimeError(PURPOSE)


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def failing_step(
    fail: Callable[[], None], *, rank: int, world_size: int, batch_size: int, device: torch.device
) -> Callable[[], Tensor]:
    del batch_size
    steps, loss = 0, torch.zeros(1, device=device)
    warmup = WARMUP_ITERATIONS[device.type] + (world_size > 1)

    def step() -> Tensor:
        nonlocal steps
        steps += 1
        if steps > warmup and rank == world_size - 1:
            print(PURPOSE, flush=True)
            fail()
        if steps > warmup and world_size > 1:
            dist.barrier()
        return loss

    return step


kill = partial(failing_step, kill_rank)
leave = partial(failing_step, leave_rank)
raises = partial(failing_step, raise_error)
hang = partial(failing_step, sleep_for_ever)
KINDS = ("kill", "leave", "raises", "hang")
# The variable of ranks that may call these functions.
ALLOWED = {FUNCTIONS_VARIABLE: ",".join(f"{__name__}:{kind}" for kind in KINDS)}


def failing(kind: str, world_size: int = 2) -> CustomStepSpec:
    """Return a spec of a step that fails in this way."""
    return CustomStepSpec(function=f"{__name__}:{kind}", world_size=world_size, per_rank_batch_size=1)
