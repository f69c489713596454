"""Trace steps of the open measurement for `ddpperf.why`, and write the profiler's raw trace to a file.

The controller reads the traces: the base may be older code, which would group the events differently.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpperf.measuring.clock import seconds_of, synchronize
from ddpperf.measuring.message_ledger import Ledger
from ddpperf.measuring.trace_split import MOST_TRACE_BYTES, PART, STEP, STEP_BYTES

if TYPE_CHECKING:
    import torch

    from ddpperf.training.step import TrainingStep

BLOCK_BYTES, BLOCKS = 2**23, 8
# glibc's mallopt: the memory that stays in the heap when it is freed, and the least size of an own mapping
TRIM, MMAP = (-1, "MALLOC_TRIM_THRESHOLD_"), (-3, "MALLOC_MMAP_THRESHOLD_")
USUAL_BYTES = {TRIM: 2**26, MMAP: 2**25}  # where glibc's own adjustment ends
KEPT_BYTES = {TRIM: 2**30, MMAP: 2**25}  # glibc before 2.35 takes no more for mappings
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

    Each step begins with a mark. Another step comes first, whose trace may lack what the profiler
    does at its start. Each step is run, even if profiling fails, because other ranks may wait in it.
    stacks: whether the trace has the Python functions, too, which takes much time.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    problem, profiler = "", None
    with _marks(step, device, training) as (marked, mark):
        try:
            profiler = profile(activities=activities, with_stack=stacks)
            profiler.start()
        except Exception as error:
            problem = f"torch's profiler does not start ({_short(error)})"
        for _ in range(1 + steps):
            marked()
        mark()  # ends the last step
        synchronize(device)
    if profiler is None or problem:
        return problem
    try:
        profiler.stop()
        profiler.export_chrome_trace(str(path))  # only prints why it cannot write the file
        size = path.stat().st_size
    except Exception as error:
        return f"torch's profiler fails ({_short(error)})"
    if size > MOST_TRACE_BYTES:
        path.unlink()
        return f"a trace of {steps} steps has {size >> 20} MiB, and at most {MOST_TRACE_BYTES >> 20} are read"
    return ""


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


@contextmanager
def _marks(step: Step, device: torch.device, training: TrainingStep | None) -> Iterator[tuple[Step, Step]]:
    """Return the step with marks in the trace, at its begin and at that of each part, and a single mark.

    On a GPU, the mark is a copy of STEP_BYTES bytes, which a replayed CUDA graph does not hide.
    """
    import torch
    from torch.profiler import record_function

    source, target = (torch.zeros(STEP_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    parts: list[Any] = []  # the part that has begun

    def enter(part: str) -> None:
        while parts:
            parts.pop().__exit__(None, None, None)
        if part:
            parts.append(record_function(f"{PART}{part}"))
            parts[-1].__enter__()

    def mark() -> None:
        if device.type == "cuda":
            target.copy_(source)

    def marked() -> None:
        mark()
        with record_function(STEP):
            step()
            enter("")

    with _entering(training, enter):
        yield marked, mark


def messages_of(step: Step, training: TrainingStep | None, *, captured: bool) -> dict[str, list[int]]:
    """Run a step and return its messages: how many of each kind, and their bytes.

    Nothing is known of a replayed CUDA graph, so nothing is run.
    """
    found: dict[str, list[int]] = {}
    if captured:
        return found
    ledger = Ledger()
    ledger.phase = ""  # until a part begins: a custom step has none
    with ledger, _entering(training, ledger.enter_part):
        step()
    for kind, nbytes in ledger.messages:
        of_kind = found.setdefault(kind, [0, 0])
        of_kind[0] += 1
        of_kind[1] += nbytes
    return found


@contextmanager
def _entering(training: TrainingStep | None, enter: Callable[[str], None]) -> Iterator[None]:
    """Call `enter` with the name of each part of a training step when the part begins."""
    if training is None:
        yield
        return
    usual, training.enter = training.enter, enter
    try:
        yield
    finally:
        training.enter = usual


def keep_memory(*, kept: bool) -> None:
    """Keep freed memory in this process, after touching 64 MiB; or give it back as usual.

    The profiler's events fragment glibc's heap: without this, each traced step asks for new pages,
    which took 8 to 15 ms of a step of 19 ms (2 CPU cores). Another C library is left as it is.
    """
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for option in (TRIM, MMAP):
        number, variable = option
        usual = int(os.environ.get(variable) or USUAL_BYTES[option])
        libc.mallopt(number, KEPT_BYTES[option] if kept else min(usual, 2**30))
    if not kept:
        libc.malloc_trim(0)
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in filter(None, blocks):
        ctypes.memset(block, 1, BLOCK_BYTES)
        libc.free(block)
