"""Run training steps for a measurement, with warm-up, CUDA graph, rounds and counters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ddpperf.measuring import clock
from ddpperf.measuring.compile_and_capture import capture, require_compiled
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs.training_step import EQUAL_STRATEGIES
from ddpperf.training.schedules import PEAK_RATE
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import gradient_bytes, require_equal_parameters

LOSS_STEPS = 5  # after 20 steps on one batch the loss is near 0 in any precision
CAPTURE_WARMUP = 11  # DDP still arranges its buckets in these steps
Run = Callable[[], None]


class MeasuredStep(Measurement):
    """Measurement of training steps that run eagerly, compiled or from a CUDA graph.

    The steps run epoch after epoch.
    train: the function that one step runs, and that is captured in a CUDA graph. The default is
    `training.train`.
    """

    def __init__(self, training: TrainingStep, train: Run | None = None) -> None:
        self.training = training
        self.train = train or training.train
        self.run = self._first_train if training.spec.compiled else self.train
        self.startup_seconds: dict[str, float] = {}
        self.captured_bytes = 0  # memory that a replay needs in addition to the allocated memory
        self.steps = self.epoch = 0
        self.left = 0  # steps until the next epoch begins
        self.early_loss = training.loss
        self.cpu_began = 0.0
        self.cpu_seconds: list[float] = []  # per step, one value for each round

    def step(self) -> None:
        """Train on the next batch; after the last batch of an epoch, begin the next epoch."""
        if not self.left:
            self.begin_epoch()
        self.left -= 1
        self.train_batch()

    def begin_epoch(self) -> None:
        self.training.input.begin(self.epoch)
        self.training.schedule.begin()
        self.epoch += 1
        self.left = self.training.spec.steps_per_epoch

    def train_batch(self) -> None:
        self.training.input.load(partial(self.training.enter, "data"))
        self.run()
        self.steps += 1
        if self.steps == LOSS_STEPS + 1:
            self.early_loss = self.training.loss

    def warm_up(self, steps: int) -> None:
        """Run warm-up steps, then capture a step in a CUDA graph if the training spec says so.

        steps: the least number of warm-up steps. A capture may need more steps.
        """
        self.warm_up_eagerly(steps)
        if self.training.spec.captured:
            self.capture()

    def warm_up_eagerly(self, steps: int) -> None:
        spec = self.training.spec
        if spec.captured:
            steps = max(steps, CAPTURE_WARMUP if spec.grouped else LOSS_STEPS + 1)
        for _ in range(steps):
            self.step()
        self.left = 0  # the first measured step begins an epoch

    def capture(self, arrange: Callable[[Callable[[], Run]], Run] = lambda once: once()) -> None:
        """Capture a training step in a CUDA graph, and measure the capture's seconds and memory.

        arrange: a function that gets a function `capture_once` and returns what a step is to run.
        Each call of `capture_once` captures the step and returns the replay of its graph.
        """
        training, device = self.training, self.training.device
        training.input.begin(self.epoch)
        training.input.load()
        training.optimizer.zero_grad()
        clock.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        self.run = arrange(lambda: capture(self.train, training.spec.execution).replay)
        self.startup_seconds["capture_seconds"] = time.perf_counter() - began
        # A replay allocates nothing. Some of the allocated memory is left from the first steps.
        peak = torch.cuda.max_memory_allocated(device)
        self.captured_bytes = peak - torch.cuda.memory_allocated(device)

    def _first_train(self) -> None:
        clock.synchronize(self.training.device)
        training, forward, losses = self.training, self.training.forward, list[Tensor]()

        def watched(*part: Any) -> Tensor:
            losses.append(forward(*part))
            return losses[-1]

        training.forward = watched
        began = time.perf_counter()
        self.train()
        clock.synchronize(self.training.device)
        self.startup_seconds["compile_seconds"] = time.perf_counter() - began
        training.forward = forward
        require_compiled(losses)
        self.run = self.train

    def start_round(self) -> None:
        if self.training.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.training.device)
        self.cpu_began = time.process_time()

    def end_round(self, steps: int) -> None:
        """Raise FloatingPointError if the training loss is NaN or infinite after a round.

        A step with NaN values has another speed.
        """
        self.cpu_seconds.append((time.process_time() - self.cpu_began) / steps)
        loss = self.training.loss.item()
        if not math.isfinite(loss):
            what = f"the loss is {loss} after a round of {steps} steps"
            how = f"SGD has a learning rate of {PEAK_RATE:g}; make the loss or its inputs smaller"
            raise FloatingPointError(f"{what}: {how}")

    def finish(self) -> dict[str, float]:
        """Return a rank's counters, such as the CPU seconds of a training step and its peak memory.

        Raises RuntimeError if ranks that must have equal parameters have different parameters.
        loss_after_5_steps: the loss after 5 steps from the initial parameters, if there were 5
        steps.
        compile_seconds, capture_seconds: seconds spent on compiling and on capturing before the
        first measured step. Earlier measurements may have filled torch's compiler cache.
        cpu_seconds: the CPU time of one step in this process. On a GPU this leaves out preparing an
        epoch. device_seconds (GPU): the seconds of one step on the device if it never waits for the
        CPU. This counter is absent for a DataLoader and PowerSGD, which make the device wait for
        more than launches. peak_memory_bytes (GPU): the peak memory of tensors in the last round.
        This counter is absent for symmetric memory, which torch does not count.
        """
        training, spec = self.training, self.training.spec
        counters: dict[str, float] = {}
        if self.steps > LOSS_STEPS:
            counters[f"loss_after_{LOSS_STEPS}_steps"] = self.early_loss.item()
        is_gpu = training.device.type == "cuda"
        peak_bytes = torch.cuda.max_memory_allocated(training.device) if is_gpu else 0
        if spec.strategy in EQUAL_STRATEGIES and spec.communication == "on":
            require_equal_parameters(training.module, spec)
        counters |= sent_bytes(training) | self.startup_seconds
        if not is_gpu:
            return counters | {"cpu_seconds": median(self.cpu_seconds)}
        if spec.captured:
            # Read only now: the collectives above let NCCL free memory of the graph's collectives.
            peak_bytes = self.captured_bytes + torch.cuda.memory_allocated(training.device)
        if not spec.maps_memory:
            counters["peak_memory_bytes"] = float(peak_bytes)
        costs = clock.launch_cost(self.step, training.device, grouped=spec.grouped)
        counters["cpu_seconds"], device_seconds = costs
        if spec.input != "dataloader" and spec.comm_hook != "powersgd":
            counters["device_seconds"] = device_seconds
        return counters


class TrainingMeasurement(Measurement):
    """Base class of measurements whose steps consist of `training_steps` training steps each."""

    training_steps = 1

    def __init__(self, training: MeasuredStep) -> None:
        self.training = training
        self.spec = training.training.spec

    def warm_up(self, steps: int) -> None:
        self.training.warm_up(steps)

    def start_round(self) -> None:
        self.training.start_round()

    def end_round(self, steps: int) -> None:
        self.training.end_round(steps * self.training_steps)


def sent_bytes(training: TrainingStep) -> dict[str, float]:
    """Return the counter gradient_bytes, the number of bytes that a training step all_reduces.

    The counter is absent without all_reduces and for PowerSGD, which compresses gradients.
    """
    spec = training.spec
    if spec.strategy not in EQUAL_STRATEGIES or spec.communication != "on" or spec.comm_hook == "powersgd":
        return {}
    itemsize = 2 if spec.comm_hook in ("bf16", "fp16") else None
    return {"gradient_bytes": float(gradient_bytes(training.module, itemsize))}
