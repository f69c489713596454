"""The energy that GPUs have used, by the counters of their driver.

A counter counts everything that its device does, also for other processes and while it is idle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import pynvml

from ddpperf.machine.gpu_description import ask

WATCH_SECONDS = 0.5  # how long a GPU's counter is watched for its update period
# A time span must last this many update periods, so that an update that falls beside it changes the
# energy by at most a twentieth.
LEAST_UPDATES = 20
FULL = 0.9  # the rounds must fill this fraction of a time span; the rest is energy of waiting

Joules = tuple[float, ...]  # by device


class EnergyCounters:
    """The energy counters of the GPUs of a run.

    update_seconds: the time between two updates of the first GPU's counter, which is watched for up
    to half a second; infinity without a counter.
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles
        self.update_seconds = median_gap(lambda: self.joules(1)) if self.joules(1) else math.inf

    def joules(self, devices: int) -> Joules:
        """Return the joules of the first GPUs since some moment, or nothing if one has no counter."""
        read = pynvml.nvmlDeviceGetTotalEnergyConsumption
        found = [ask(read, handle) for handle in self._handles[:devices]]
        known = tuple(millijoules / 1e3 for millijoules in found if millijoules is not None)
        return known if len(known) == len(found) else ()


def median_gap(read: Callable[[], Joules]) -> float:
    """Return the median seconds between two changes of a counter, or infinity if it hardly changes."""
    changes: list[float] = []
    began, last = time.monotonic(), read()
    while (now := time.monotonic()) - began < WATCH_SECONDS:
        if (current := read()) != last:
            changes.append(now)
            last = current
        time.sleep(1e-3)
    return median([after - before for before, after in pairwise(changes)] or [math.inf])


@dataclass(frozen=True, kw_only=True)
class Round:
    """A measured round of a process set, with the counters' joules before and after it.

    steps: the number of steps, also of those that did not count.
    """

    began: float
    ended: float
    before: Joules
    after: Joules
    steps: int


def joules_per_step(spans: Sequence[Sequence[Round]], update_seconds: float) -> Joules:
    """Return the energy of each device in one step, or nothing if it is too uncertain.

    spans: successive rounds between which no other process set measured. The energy of a span counts
    from the begin of its first round to the end of its last one. It is known well if the span lasts
    LEAST_UPDATES update periods of the counters, and if the rounds fill the fraction FULL of it.
    """
    used = []
    for rounds in spans:
        before, after = rounds[0].before, rounds[-1].after
        lasted = rounds[-1].ended - rounds[0].began
        busy = sum(one.ended - one.began for one in rounds)
        if not (before and after) or lasted < LEAST_UPDATES * update_seconds or busy < FULL * lasted:
            return ()
        used.append([end - begin for begin, end in zip(before, after, strict=True)])
    steps = sum(one.steps for rounds in spans for one in rounds)
    return tuple(sum(joules) / steps for joules in zip(*used, strict=True)) if steps else ()
