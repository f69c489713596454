"""Time steps on one rank, with CUDA events on a GPU and with perf_counter on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

PROBES = 9
LAUNCH_SECONDS = 1e-3  # longer than even a late launch takes
FASTEST_CLOCK = 2e9  # cycles per second of a GPU, about; a slower GPU spins longer


def seconds_of(step: Callable[[], None], iterations: int, device: torch.device) -> float:
    """Return the seconds in which the device completes `iterations` calls of `step`.

    On a GPU two events are recorded on the current stream. Work on other streams counts if the
    current stream waits for it, as DDP and torch.distributed's synchronous collectives make it
    wait.
    """
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        for _ in range(iterations):
            step()
        last.record(stream)
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    return time.perf_counter() - start


def keep_busy(seconds: float) -> None:
    """Let the current GPU spin for at least about `seconds`, while the CPU launches short steps.

    Otherwise the GPU would wait for a CPU whose launches take longer than the steps, and the waits
    would count as time of the steps.
    """
    torch.cuda._sleep(int(seconds * FASTEST_CLOCK))


def delayed(step: Callable[[], None], seconds: float, device: torch.device) -> Callable[[], None]:
    """Return a function that calls `step` and then waits for the given number of seconds.

    On a GPU, the device waits after the work of the step. The caller waits everywhere: a device that
    waits for kernel launches would hide a delay of its own.
    """
    if not seconds:
        return step
    cycles = int(seconds * _cycles_per_second(device)) if device.type == "cuda" else 0

    def slower() -> None:
        step()
        if device.type == "cuda":
            torch.cuda._sleep(cycles)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return slower


def _cycles_per_second(device: torch.device, cycles: int = 10**8) -> float:
    """Measure how many cycles `torch.cuda._sleep` counts per second at the GPU's current clock.

    cycles: how many cycles are timed. 10**8 cycles take about 50 ms.
    """
    torch.cuda._sleep(cycles)  # the first call loads the kernel
    return cycles / seconds_of(lambda: torch.cuda._sleep(cycles), 1, device)


def launch_cost(step: Callable[[], None], device: torch.device, *, grouped: bool) -> tuple[float, float]:
    """Return the CPU seconds of one step, and its GPU seconds without waits for the CPU.

    The CPU seconds are the minimum of several steps. Each of these steps starts on an idle device,
    so that the CPU never waits for a full queue. The GPU seconds are the median of several steps.
    Before each of these steps the device spins until the whole step is in its queue. (The queue
    holds about a thousand operations. A longer step waits for its other operations.)
    grouped: whether the devices of all ranks wait for each other before the timed step.
    """
    cpu_seconds, wall_seconds, device_seconds = [], [], []
    meeting = torch.zeros(1, device=device)
    for _ in range(PROBES):
        synchronize(device)
        began, cpu_began = time.perf_counter(), time.process_time()
        step()
        cpu_seconds.append(time.process_time() - cpu_began)
        wall_seconds.append(time.perf_counter() - began)
    cycles = int((2 * median(wall_seconds) + LAUNCH_SECONDS) * _cycles_per_second(device, 10**6))
    for _ in range(PROBES):
        synchronize(device)
        torch.cuda._sleep(cycles)
        if grouped:
            dist.all_reduce(meeting)
        device_seconds.append(seconds_of(step, 1, device))
    return min(cpu_seconds), median(device_seconds)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all its work, or do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
