"""A step of data-parallel training, as short as it can be written, ready to be repeated and timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ddpperf.execution import capture, compiled
from ddpperf.instruments import timing
from ddpperf.specs import TrainingSpec, gpu_reason
from ddpperf.specs.strategy import EQUAL_STRATEGIES
from ddpperf.training.optim import PEAK_RATE, Schedule, cosine_rates, optimizer_of
from ddpperf.training.strategies import parallelize, require_equal_parameters, synchronization
from ddpperf.training.task import task

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_STEPS = 5  # while the loss on the one batch still falls; after 20 it is near 0 in any precision
CAPTURE_WARMUP = 11  # steps before a capture, in which DDP still arranges its buckets; without DDP one more than LOSS_STEPS


class TrainingStep:
    """Model, optimizer and input of `rank`, on `device`; `step` trains on the next batch.

    Every rank starts from the same parameters and has batches of its own, so that equal parameters afterwards show
    that the gradients were synchronized. Raises ValueError for what the spec asks of a device that cannot do it.
    """

    max_iterations = 1000

    def __init__(self, spec: TrainingSpec, *, rank: int, device: torch.device) -> None:
        if reason := gpu_reason(spec, device.type):
            raise ValueError(reason)
        allow_tf32(spec.precision == "tf32")
        self.spec = spec
        self.device = device
        self.autocast_dtype = AUTOCAST_DTYPES.get(spec.precision)
        self.inner, self.input, self.loss_of = task(spec, rank, device)
        trained = [each for each in self.inner.parameters() if each.requires_grad]
        self.gradient_bytes = sum(each.numel() * each.element_size() for each in trained)
        self.halved_bytes = 2 * sum(each.numel() for each in trained)
        self.model = parallelize(self.inner, spec, device)
        # of a part's loss in what is added up: on this rank, and by OwnDDP over all ranks; DDP itself takes their mean
        self.share = 1 / (spec.accumulation_steps * (spec.world_size if spec.strategy == "own_ddp" else 1))
        self.optimizer = optimizer_of(self.model, spec, device)
        self.schedule = Schedule(self.optimizer, self.rates(), device, captured=spec.captured)
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.forward: Callable[[Any, Tensor], Tensor] = self.loss_on
        self.take = self.input.take
        if spec.compiled:
            half = self.gradient_bytes // 2 if spec.strategy == "own_ddp" else 0
            self.forward = compiled(self.loss_on, spec.inductor, part_bytes=half)
            if spec.input == "device":
                self.take = compiled(self.input.take, spec.inductor)
        self.run: Callable[[], None] = self.first_train if spec.compiled else self.train
        self.startup_seconds: dict[str, float] = {}
        self.captured_bytes = 0  # that a captured step needs beside what is held
        self.loss = torch.empty((), device=device)
        self.early_loss = self.loss
        self.steps = self.epoch = self.place = 0
        self.enter: Callable[[str], None] = lambda part: None  # told which part of a step begins
        self.before_update: Callable[[], object] = lambda: None
        self.cpu_began = 0.0
        self.cpu_seconds: list[float] = []  # of a step, by round

    def rates(self) -> list[float]:
        """The learning rate of each step until the schedule begins anew."""
        return cosine_rates(PEAK_RATE, self.spec.steps_per_epoch)

    # --- a step

    def step(self) -> None:
        self.advance()

    def advance(self) -> None:
        """Train on the next batch; after an epoch's last one begins the next epoch."""
        if self.place == 0:
            self.begin_epoch()
        self.input.load()
        self.run()
        self.place = (self.place + 1) % self.spec.steps_per_epoch

    def begin_epoch(self) -> None:
        self.input.begin(self.epoch)
        self.schedule.begin()
        self.epoch += 1

    def train(self) -> None:
        """One optimizer step on the input's next batch: all that a graph holds."""
        self.enter("data")
        inputs, targets = self.take()
        self.enter("optimizer")
        self.schedule.step()
        self.optimizer.zero_grad()
        parts = self.spec.accumulation_steps
        losses = []
        for number, part in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
            with synchronization(
                self.model, last=number == parts - 1 and self.spec.communication != "no_sync"
            ):
                self.enter("forward")
                loss = self.forward(*part)
                self.enter("backward")
                scaled = self.scaler.scale(loss)
                scaled.backward(None if self.share == 1 else torch.full_like(scaled, self.share))
            losses.append(loss.detach())
        self.enter("optimizer")
        self.before_update()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.loss = losses[0] if parts == 1 else torch.stack(losses).mean()
        if self.steps == LOSS_STEPS:
            self.early_loss = self.loss
        self.steps += 1

    def loss_on(self, inputs: Any, targets: Tensor) -> Tensor:
        """The mean loss on a batch."""
        with self.autocast():
            return self.loss_of(self.model(inputs), targets)

    def autocast(self) -> AbstractContextManager[object]:
        """Without a cache of casted weights where a step is captured: a graph would keep those of the step that filled it."""
        cache = not self.spec.captured
        return torch.autocast(
            self.device.type, self.autocast_dtype, self.autocast_dtype is not None, cache_enabled=cache
        )

    def sent(self) -> dict[str, float]:
        """gradient_bytes: what a step gives to all_reduces; absent without them, and for PowerSGD."""
        sends = self.spec.strategy in EQUAL_STRATEGIES and self.spec.communication == "on"
        if not sends or self.spec.comm_hook == "powersgd":
            return {}
        return {
            "gradient_bytes": float(
                self.halved_bytes if self.spec.comm_hook in ("bf16", "fp16") else self.gradient_bytes
            )
        }

    # --- starting

    def first_train(self) -> None:
        """The first step of a compiled form, which compiles."""
        timing.synchronize(self.device)
        began = time.perf_counter()
        self.train()
        timing.synchronize(self.device)
        self.startup_seconds["compile_seconds"] = time.perf_counter() - began
        self.run = self.train

    def warm_up(self, steps: int) -> None:
        """Train `steps` steps, or as many as a capture needs, and capture the step that is to be replayed."""
        if self.spec.captured:
            steps = max(steps, CAPTURE_WARMUP if self.spec.grouped else LOSS_STEPS + 1)
        for _ in range(steps):
            self.advance()
        if self.spec.captured:
            self.input.begin(self.epoch)
            self.input.load()
            self.optimizer.zero_grad()
            timing.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            began = time.perf_counter()
            self.run = self.captured_train()
            self.startup_seconds["capture_seconds"] = time.perf_counter() - began
            # a replay allocates nothing; what is held besides is subtracted, for some of it is still the first steps'
            self.captured_bytes = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(
                self.device
            )
        self.place = 0  # an epoch begins with what is measured

    def captured_train(self) -> Callable[[], None]:
        return capture(self.train, self.spec.execution).replay

    # --- rounds

    def start_round(self) -> None:
        """Each round trains on; the CPU's seconds in it are counted, and on a GPU its peak of memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.cpu_began = time.process_time()

    def end_round(self, steps: int) -> None:
        """Raise FloatingPointError unless the loss is a finite number: NaN computes at another speed."""
        self.cpu_seconds.append((time.process_time() - self.cpu_began) / steps)
        loss = self.loss.item()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} after a round of {steps} steps")

    def finish(self) -> dict[str, float]:
        """Counters of this rank; raises RuntimeError if, with DDP, ours or ZeRO, its parameters are not the other ranks'.

        loss_after_5_steps: of training from the start, to lay beside a precision's speed; absent after fewer. compile_seconds,
        capture_seconds: of the form; the first step's, with what this run has compiled before in the compiler's cache.
        cpu_seconds: what a step costs this process, without preparing an epoch on a GPU. On a GPU only: device_seconds, what a
        step costs the device when that need not wait for the CPU; absent for a DataLoader and PowerSGD, which wait for
        something else than launches. peak_memory_bytes, of tensors in the last round; absent for symmetric memory, whose
        buffers torch does not count. And what `sent` says.
        """
        counters = (
            {f"loss_after_{LOSS_STEPS}_steps": self.early_loss.item()} if self.steps > LOSS_STEPS else {}
        )
        cuda = self.device.type == "cuda"
        peak_bytes = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        if self.spec.strategy in EQUAL_STRATEGIES and self.spec.communication == "on":
            require_equal_parameters(self.model)
        counters |= self.sent()
        counters |= self.startup_seconds
        if not cuda:
            return counters | {"cpu_seconds": median(self.cpu_seconds)}
        if (
            self.spec.captured
        ):  # after the collectives above, with which NCCL lets go of what it held for those before
            peak_bytes = self.captured_bytes + torch.cuda.memory_allocated(self.device)
        if not self.spec.maps_memory:
            counters["peak_memory_bytes"] = float(peak_bytes)
        counters["cpu_seconds"], device_seconds = timing.launch_cost(
            self.advance, self.device, grouped=self.spec.grouped
        )
        if self.spec.input != "dataloader" and self.spec.comm_hook != "powersgd":
            counters["device_seconds"] = device_seconds
        return counters


def allow_tf32(allowed: bool) -> None:
    """Switch TF32 on or off for every kind of operation by itself: by default convolutions use it, and in torch 2.11 the
    one setting for all leaves them as they are."""
    backends: Any = torch.backends
    backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
