"""Trace steps of the open measurement for `ddpperf.why`, and write the profiler's raw trace to a file.

The controller reads the traces: the base may be older code, which would group the events differently.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpperf.measuring.clock import seconds_of, synchronize
from ddpperf.measuring.trace_split import MOST_TRACE_BYTES, PART, STEP, STEP_BYTES, profiled

if TYPE_CHECKING:
    import torch

    from ddpperf.training.step import TrainingStep

BLOCK_BYTES, BLOCKS = 2**23, 8
# glibc's limits on the freed memory at the heap's end and on blocks in the heap: the number for mallopt, the
# bytes where glibc's own adjustment ends, and those while memory is kept.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = (-1, 2**26, 2**30), (-3, 2**25, 2**25)
Step = Callable[[], None]


def timed(step: Step, steps: int, device: torch.device) -> dict[str, Any]:
    """Run steps, and return the seconds of each (on a GPU, of all: their mean), and a step's page faults."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if device.type == "cuda":
        seconds = [seconds_of(step, steps, device) / steps]
    else:
        seconds = [seconds_of(step, 1, device) for _ in range(steps)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"seconds": seconds, "page_faults": faults / steps}


def traced(
    step: Step, steps: int, device: torch.device, path: Path, training: TrainingStep | None, *, stacks: bool
) -> str:
    """Trace steps and write the raw trace to a file; return why there is none, or "".

    Each step begins with a mark in the trace, and so does each part of a training step. On a GPU, the
    mark is a copy of STEP_BYTES bytes, too, which a replayed CUDA graph does not hide. Another step
    comes first, whose trace may lack what the profiler does at its start.
    stacks: as in `profiled`.
    """
    import torch
    from torch.profiler import record_function

    source, target = (torch.zeros(STEP_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    part = ExitStack()  # holds the part that has begun

    def enter(name: str) -> None:
        part.close()
        part.enter_context(record_function(f"{PART}{name}"))

    def mark() -> None:
        if device.type == "cuda":
            target.copy_(source)

    def work() -> None:
        for _ in range(1 + steps):
            mark()
            with record_function(STEP), part:
                step()
        mark()  # ends the last step
        synchronize(device)

    if training is None:
        problem = profiled(work, path, device, operators=True, stacks=stacks)
    else:
        usual, training.enter = training.enter, enter
        problem = profiled(work, path, device, operators=True, stacks=stacks)
        training.enter = usual
    if not problem and (size := path.stat().st_size) > MOST_TRACE_BYTES:
        path.unlink()
        return f"a trace of {steps} steps has {size >> 20} MiB, and at most {MOST_TRACE_BYTES >> 20} are read"
    return problem


def keep_memory(*, kept: bool) -> None:
    """Keep freed memory in this process, after touching 64 MiB; or give it back as usual.

    The profiler's events fragment glibc's heap: without this, each traced step asks for new pages,
    which took 8 to 15 ms of a step of 19 ms (2 CPU cores).
    """
    libc: Any = ctypes.CDLL(None)
    for number, usual, while_kept in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        libc.mallopt(number, while_kept if kept else usual)
    if not kept:
        libc.malloc_trim(0)
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in filter(None, blocks):
        ctypes.memset(block, 1, BLOCK_BYTES)
        libc.free(block)
