"""The learning rate of each step of a run: torch's schedulers, as lists of numbers.

A list can lie on a device, where a captured step reads it; a scheduler object cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddpperf.specs import ScheduleName

if (
    TYPE_CHECKING
):  # torch is imported where it is used: recipes scale their rates in the controller, which has no use for it
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

LEAST_RATE = 1e-3  # of the peak, where a linear decay ends; of its last rate, where a warm-up begins
DROP = 0.1  # of step and multistep
CYCLES = 2  # of cyclic in a run


def scheduled_rates(name: ScheduleName, peak: float, *, steps: int, warm_up: int) -> list[float]:
    """Of each of a run's steps: `warm_up` of them up to where the schedule begins, in a straight line (Goyal et al. 2017), then
    the schedule's.

    step: a tenth after each third. multistep: a tenth after a half and after three quarters (He et al. 2016). cosine: half a
    cosine to 0 (Loshchilov and Hutter 2017). linear: in a straight line to a thousandth. cyclic: two triangles between a tenth
    of the peak and the peak (Smith 2017). Raises ValueError for a warm-up that is longer than the run.
    """
    from torch.optim import lr_scheduler

    if not 0 <= warm_up <= steps:
        raise ValueError(f"a warm-up of {warm_up} steps is longer than the run of {steps}; make it shorter")
    rest = steps - warm_up
    schedules: dict[str, Callable[[Optimizer], LRScheduler]] = {
        "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "step": lambda optimizer: lr_scheduler.StepLR(optimizer, max(1, -(-rest // 3)), DROP),
        "multistep": lambda optimizer: lr_scheduler.MultiStepLR(
            optimizer, [-(-rest // 2), -(-rest * 3 // 4)], DROP
        ),
        "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, max(1, rest)),
        "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, LEAST_RATE, max(1, rest - 1)),
        "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
            optimizer,
            peak / 10,
            peak,
            max(1.0, rest / (2 * CYCLES)),  # type: ignore[arg-type]  # it takes part of a step, too
            cycle_momentum=False,
        ),
    }
    scheduled = _rates(schedules[name], peak, rest)
    first = scheduled[0] if scheduled else peak
    return (
        _rates(lambda optimizer: lr_scheduler.LinearLR(optimizer, LEAST_RATE, 1.0, warm_up), first, warm_up)
        + scheduled
    )


def _rates(make: Callable[[Optimizer], LRScheduler], peak: float, steps: int) -> list[float]:
    """What a scheduler gives in each of so many steps."""
    import torch

    if not steps:
        return []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def linearly_scaled(rate: float, batch_size: int, base_batch_size: int) -> float:
    """The rate of a larger batch, k times that of one k times smaller (Goyal et al. 2017)."""
    return rate * batch_size / base_batch_size


def square_root_scaled(rate: float, batch_size: int, base_batch_size: int) -> float:
    """The rate of a larger batch, sqrt(k) times that of one k times smaller: a step's variance stays (Krizhevsky 2014)."""
    return rate * math.sqrt(batch_size / base_batch_size)
