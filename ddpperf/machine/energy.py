"""The energy that GPUs have used, by the counters of their driver.

A counter counts everything that its device does, also for other processes and while it is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from ddpperf.machine.gpu_description import ask

# The counters of H100s and H200s move about every 0.1 s. An update just outside a time span of this
# length changes its energy by at most a twentieth.
LEAST_SECONDS = 2.0
FULL = 0.9  # the rounds must fill this fraction of a time span; the rest is energy of waiting

Joules = tuple[float, ...]  # by device


def joules_now(handles: Sequence[Any]) -> Joules:
    """Return each GPU's energy counter in joules, or nothing if one of the GPUs has no counter."""
    found = [ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles]
    known = tuple(millijoules / 1e3 for millijoules in found if millijoules is not None)
    return known if len(known) == len(found) else ()


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


def joules_per_step(spans: Sequence[Sequence[Round]]) -> Joules:
    """Return the energy of each device in one step, or nothing if it is too uncertain.

    spans: successive rounds between which no other process set measured. The energy of a span counts
    from the begin of its first round to the end of its last one. It is known well if the span lasts
    LEAST_SECONDS, and if the rounds fill the fraction FULL of it.
    """
    used = []
    for rounds in spans:
        before, after = rounds[0].before, rounds[-1].after
        lasted = rounds[-1].ended - rounds[0].began
        busy = sum(one.ended - one.began for one in rounds)
        if not (before and after) or lasted < LEAST_SECONDS or busy < FULL * lasted:
            return ()
        used.append([end - begin for begin, end in zip(before, after, strict=True)])
    steps = sum(one.steps for rounds in spans for one in rounds)
    return tuple(sum(joules) / steps for joules in zip(*used, strict=True)) if steps else ()
