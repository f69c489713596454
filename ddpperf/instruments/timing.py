"""Timing a number of steps on one rank: by device events on a GPU, by perf_counter on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

PROBES = 9
LAUNCH_SECONDS = 1e-3  # more than a launch takes that is late


def seconds_of(step: Callable[[], None], iterations: int, device: torch.device) -> float:
    """Seconds that `iterations` calls of `step` take, to the end of the last one's work on the device.

    On CUDA the two events lie on the current stream, so work on other streams counts as far as the current stream
    waits for it, as torch.distributed's synchronous collectives and DDP make it wait.
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
    """`step` with a slow-down of `seconds` after it: on a GPU the device spins, on the CPU the caller."""
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
    """How fast the counter runs by which a GPU sleeps: measured, for it follows the GPU's clock."""
    cycles = 10**8
    torch.cuda._sleep(cycles)  # the first call loads the kernel
    return cycles / seconds_of(lambda: torch.cuda._sleep(cycles), 1, device)


def launch_cost(step: Callable[[], None], device: torch.device, *, grouped: bool) -> tuple[float, float]:
    """What a step costs a GPU's process in CPU seconds, and the device in seconds when it need not wait for that process.

    The first is read around a step that is given to an idle device: then no full queue makes the CPU wait. It is the least of
    several, since what else the machine does only adds. For the second, a median, the device spins until all of a step lies in
    its queue (of about a thousand operations; of a longer step a part is waited for).
    grouped: the ranks' devices wait for each other after that, so that no rank's wait for another counts.
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
    """Wait until the device has done all it was given; the CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
