"""The energy that GPUs have used, by the counters of their driver.

A counter counts everything that its device does, also for other processes and while it is idle.
CUDA is never initialised here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ddpperf.machine.hardware import query_nvml

WATCH_SECONDS = 0.5  # how long a GPU's counter is watched for its update period
# A window must last this many update periods, so that an update that falls beside it changes the energy
# by at most a twentieth.
LEAST_UPDATES = 20
FULL = 0.9  # the rounds must fill this fraction of a window; the rest is energy of waiting

Joules = tuple[float, ...]  # by device


@dataclass(frozen=True, kw_only=True)
class EnergyCounters:
    """The energy counters of all GPUs of a run.

    read: returns the joules of each device since some moment, or None if a counter cannot be read.
    update_seconds: the time between two updates of the counters.
    """

    read: Callable[[], Joules | None]
    update_seconds: float


def gpu_counters(handles: Sequence[Any]) -> EnergyCounters | None:
    """Return the energy counters of GPUs, or None if one of them has none.

    The first GPU's counter is watched for up to half a second, to learn how often it is updated.
    """

    def read() -> Joules | None:
        found = [query_nvml("nvmlDeviceGetTotalEnergyConsumption", handle) for handle in handles]
        known = tuple(millijoules / 1e3 for millijoules in found if millijoules is not None)
        return known if len(known) == len(handles) else None

    if not handles or read() is None:
        return None
    first = handles[0]
    period = update_seconds(lambda: query_nvml("nvmlDeviceGetTotalEnergyConsumption", first))
    return EnergyCounters(read=read, update_seconds=period)


def update_seconds(read: Callable[[], Any]) -> float:
    """Return the median time between two changes of a counter, or infinity if it hardly changes."""
    changes: list[float] = []
    began, last = time.monotonic(), read()
    while (now := time.monotonic()) - began < WATCH_SECONDS:
        if (current := read()) != last:
            changes.append(now)
            last = current
        time.sleep(1e-3)
    gaps = [after - before for before, after in pairwise(changes)]
    return median(gaps) if gaps else math.inf


@dataclass(kw_only=True)
class Window:
    """A time without interruption in which one process set measured rounds.

    before, after: the counters' joules of each device; None if they cannot be read. busy_seconds:
    the time within the rounds. steps: the number of steps, of rounds that did not count, too.
    """

    began: float
    before: Joules | None
    ended: float = 0.0
    after: Joules | None = None
    busy_seconds: float = 0.0
    steps: int = 0


def joules_per_step(windows: Sequence[Window], update_seconds: float) -> Joules:
    """Return the energy of each device in one step, or nothing if it is too uncertain.

    It is known well if each window lasts LEAST_UPDATES update periods of the counters, and if the
    rounds fill at least the fraction FULL of it.
    """
    used = []
    for window in windows:
        lasted, before, after = window.ended - window.began, window.before, window.after
        is_short = lasted < LEAST_UPDATES * update_seconds
        if before is None or after is None or is_short or window.busy_seconds < FULL * lasted:
            return ()
        used.append([end - begin for begin, end in zip(before, after, strict=True)])
    steps = sum(window.steps for window in windows)
    return tuple(sum(joules) / steps for joules in zip(*used, strict=True)) if steps else ()
