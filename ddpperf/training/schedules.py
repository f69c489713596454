"""Compute the learning rate of each training step in advance, as a list of numbers.

A list can be copied to a device, where a CUDA graph of a step reads it. torch's schedulers cannot
be copied, so that they only make the lists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ddpperf.specs import RunSpec, TrainingSpec
from ddpperf.specs.whole_training import ScheduleName

PEAK_RATE = 0.01  # learning rate of a measured step, which has no training recipe
LEAST_RATE = 1e-3  # fraction of the peak rate at which a linear decay ends and a warm-up begins
DROP = 0.1  # factor of each drop in the schedules step and multistep
CYCLES = 2  # number of triangles in the schedule cyclic


def rates_of(spec: TrainingSpec) -> list[float]:
    """Return the learning rate of each training step that a training spec describes.

    For a spec without a training recipe, these are the steps of one epoch, along half a cosine. The
    learning rates repeat in each epoch (SGDR, Loshchilov and Hutter 2017).
    """
    if isinstance(spec, RunSpec):
        warm_up = sum(spec.epoch_steps[: spec.warmup_epochs])
        return scheduled_rates(spec.schedule, spec.rate, steps=sum(spec.epoch_steps), warm_up=warm_up)
    return scheduled_rates("cosine", PEAK_RATE, steps=spec.steps_per_epoch, warm_up=0)


def scheduled_rates(name: ScheduleName, peak: float, *, steps: int, warm_up: int) -> list[float]:
    """Return the learning rate of each training step for a schedule such as "step" or "cosine".

    During the first `warm_up` steps the learning rate rises linearly to the schedule's first rate
    (Goyal et al. 2017). After the warm-up the schedules are: "step" falls to a tenth after each
    third. "multistep" falls to a tenth after a half and after three quarters (He et al. 2016).
    "cosine" follows half a cosine to 0 (Loshchilov and Hutter 2017). "linear" falls to a
    thousandth. "cyclic" makes two triangles between a tenth of the peak and the peak (Smith 2017).
    "one_cycle" rises from 1/25 of the peak during the first 30% of the steps, and then falls to
    almost 0 (Smith and Topin 2018, with torch's defaults).
    """
    rest = steps - warm_up
    drops = [-(-rest // 2), -(-rest * 3 // 4)]
    linear = lr_scheduler.LinearLR
    half_cycle: Any = max(1.0, rest / (2 * CYCLES))  # torch takes part of a step, too
    cyclic = partial(lr_scheduler.CyclicLR, step_size_up=half_cycle)
    schedules: dict[str, Callable[[Optimizer], LRScheduler]] = {
        "constant": partial(lr_scheduler.ConstantLR, factor=1.0),
        "step": partial(lr_scheduler.StepLR, step_size=max(1, -(-rest // 3)), gamma=DROP),
        "multistep": partial(lr_scheduler.MultiStepLR, milestones=drops, gamma=DROP),
        "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=max(1, rest)),
        "linear": partial(linear, start_factor=1.0, end_factor=LEAST_RATE, total_iters=max(1, rest - 1)),
        "cyclic": partial(cyclic, base_lr=peak / 10, max_lr=peak, cycle_momentum=False),
        "one_cycle": partial(
            lr_scheduler.OneCycleLR, max_lr=peak, total_steps=max(1, rest), cycle_momentum=False
        ),
    }
    scheduled = _rates(schedules[name], peak, rest)
    first = scheduled[0] if scheduled else peak
    rising = partial(linear, start_factor=LEAST_RATE, end_factor=1.0, total_iters=warm_up)
    return _rates(rising, first, warm_up) + scheduled


def _rates(make: Callable[[Optimizer], LRScheduler], peak: float, steps: int) -> list[float]:
    """Return the first `steps` learning rates of one of torch's schedulers."""
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


class Schedule:
    """Sets an optimizer's learning rate before each training step, by a list of learning rates.

    device: if given, keep the learning rates and the number of the step as tensors there. A CUDA
    graph would replay a plain number as it was at the capture.
    """

    def __init__(self, optimizer: Optimizer, rates: list[float], device: torch.device | None) -> None:
        self.optimizer, self.rates = optimizer, rates
        self.steps = 0
        self.rate: Tensor | None = None
        if device is not None:
            self.rates_on_device = torch.tensor(rates, device=device)
            self.step_on_device = torch.zeros(1, dtype=torch.int64, device=device)
            self.rate = torch.tensor(rates[0], device=device)
            self._set(self.rate)

    def _set(self, rate: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def begin(self) -> None:
        """Begin again with the learning rate of the first training step."""
        self.steps = 0
        if self.rate is not None:
            self.step_on_device.fill_(0)

    def step(self) -> None:
        """Set the optimizer's learning rate for the next training step."""
        if self.rate is None:
            self._set(self.rates[self.steps])
            self.steps += 1
        else:
            torch.index_select(self.rates_on_device, 0, self.step_on_device, out=self.rate.view(1))
            self.step_on_device.add_(1)
