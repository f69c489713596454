"""Timing of steps on one rank: by device events on a GPU, by perf_counter on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

PROBES = 9
LAUNCH_SECONDS = 1e-3  # longer than even a late launch takes


def seconds_of(step: Callable[[], None], iterations: int, device: torch.device) -> float:
    """Return the seconds of `iterations` calls of `step`, until the device has done their work.

    On a GPU two events are recorded on the current stream. Work on other streams counts if the
    current stream waits for it, as DDP and torch.distributed's synchronous collectives make it wait.
    """
    if device.type == "cuda":
        return _device_seconds(step, iterations, device)
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    return time.perf_counter() - start


def _device_seconds(step: Callable[[], None], iterations: int, device: torch.device) -> float:
    stream = torch.cuda.current_stream(device)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for _ in range(iterations):
        step()
    end.record(stream)
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def delayed(step: Callable[[], None], seconds: float, device: torch.device) -> Callable[[], None]:
    """Return `step` followed by a delay: on a GPU the device spins, on the CPU the caller."""
    if not seconds:
        return step
    cycles = int(seconds * _cycles_per_second(device)) if device.type == "cuda" else 0

    def slower() -> None:
        step()
        if device.type == "cuda":
            torch.cuda._sleep(cycles)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return slower


def _cycles_per_second(device: torch.device) -> float:
    """Measure the frequency of the counter by which a GPU sleeps, which follows the GPU's clock."""
    cycles = 10**8
    torch.cuda._sleep(cycles)  # the first call loads the kernel
    return cycles / seconds_of(lambda: torch.cuda._sleep(cycles), 1, device)


def launch_cost(step: Callable[[], None], device: torch.device, *, grouped: bool) -> tuple[float, float]:
    """Return a step's CPU seconds, and its seconds on the GPU if it need not wait for the CPU.

    CPU seconds are the least of several steps on an idle device, where no full queue makes the CPU
    wait. For the GPU's seconds, a median, the device spins until the whole step is in its queue.
    (The queue holds about a thousand operations; a longer step waits for the rest.)
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
    cycles = int((2 * median(wall_seconds) + LAUNCH_SECONDS) * _cycles_per_second(device))
    for _ in range(PROBES):
        synchronize(device)
        torch.cuda._sleep(cycles)
        if grouped:
            dist.all_reduce(meeting)
        device_seconds.append(seconds_of(step, 1, device))
    return min(cpu_seconds), median(device_seconds)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work; do nothing for the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
