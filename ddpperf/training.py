"""Data-parallel training, as short as it can be written, ready to be repeated and timed: a step, or an epoch of steps."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpperf.data import EpochBatches, Images, load_images
from ddpperf.inputs import Batch, DeviceInput, FixedInput, LoaderInput, normalized
from ddpperf.models import build
from ddpperf.own_model import WrongModel, own_model
from ddpperf.specs import DATA_VARIABLE, TrainingSpec, is_own_model

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
LOSS_STEPS = 5  # while the loss on the one batch still falls; after 20 it is near 0 in any precision
REPORT_SECONDS = 1.0


class TrainingStep:
    """Model, optimizer and input of `rank`, on `device`; `step` trains on the next batch.

    Every rank starts from the same parameters and has batches of its own, so that equal parameters afterwards show
    that the gradients were synchronized.
    """

    max_iterations = 1000

    def __init__(self, spec: TrainingSpec, *, rank: int, device: torch.device) -> None:
        allow_tf32(spec.precision == "tf32")
        self.autocast_dtype = AUTOCAST_DTYPES.get(spec.precision)
        self.device = device
        self.model, self.input, self.loss_of = _task(spec, rank, device)
        self.gradient_bytes = sum(each.numel() * each.element_size() for each in self.model.parameters() if each.requires_grad)
        self.synchronized = spec.strategy == "ddp"
        if self.synchronized:
            self.model = DistributedDataParallel(self.model, device_ids=[device] if device.type == "cuda" else None)
        elif spec.strategy == "data_parallel":
            self.model = DataParallel(self.model, device_ids=list(range(spec.world_size)))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=device.type == "cuda"
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.batches = itertools.chain.from_iterable(map(self.input.epoch, itertools.count()))
        self.loss = torch.empty((), device=device)
        self.early_loss = self.loss
        self.steps = 0

    def start_round(self) -> None:
        """Nothing to prepare: each round trains on."""

    def step(self) -> None:
        self.train(next(self.batches))

    def train(self, batch: Batch) -> None:
        """One optimizer step on inputs and targets."""
        inputs, targets = batch
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            self.loss = self.loss_of(self.model(inputs), targets)
        self.scaler.scale(self.loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.steps == LOSS_STEPS:
            self.early_loss = self.loss.detach()
        self.steps += 1

    def end_round(self, steps: int) -> None:
        """Raise FloatingPointError unless the loss is a finite number: NaN computes at another speed."""
        loss = self.loss.item()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} after a round of {steps} steps")

    def finish(self) -> dict[str, float]:
        """Counters of this rank; raises RuntimeError if its parameters are not the other ranks'.

        loss_after_5_steps: of training from the start, to lay beside a precision's speed; absent after fewer. gradient_bytes:
        what a step gives to all_reduce. peak_memory_bytes: of tensors on this rank's device; absent on the CPU.
        """
        counters = {f"loss_after_{LOSS_STEPS}_steps": self.early_loss.item()} if self.steps > LOSS_STEPS else {}
        if self.synchronized:
            require_equal_parameters(self.model)
            counters["gradient_bytes"] = float(self.gradient_bytes)
        if self.device.type == "cuda":
            counters["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
        return counters


class TrainingEpoch(TrainingStep):
    """The same training, an epoch at a time. after_step: called after each step. report: told the fraction done, about once a
    second."""

    def __init__(self, spec: TrainingSpec, *, rank: int, device: torch.device) -> None:
        super().__init__(spec, rank=rank, device=device)
        self.after_step: Callable[[], None] = lambda: None
        self.report: Callable[[float], None] = lambda fraction: None
        self.steps_per_epoch = spec.steps_per_epoch
        self.epoch = 0

    def warm_up(self, steps: int) -> None:
        """The first epoch; of one batch again and again a few steps are as good, at most an epoch."""
        if isinstance(self.input, FixedInput):
            for batch in itertools.islice(self.input.epoch(0), steps):
                self.train(batch)
        else:
            self.step()

    def step(self) -> None:
        reported = time.monotonic()
        for number, batch in enumerate(self.input.epoch(self.epoch)):
            self.train(batch)
            self.after_step()
            if (now := time.monotonic()) - reported > REPORT_SECONDS:
                self.report((number + 1) / self.steps_per_epoch)
                reported = now
        self.epoch += 1


def _task(
    spec: TrainingSpec, rank: int, device: torch.device
) -> tuple[nn.Module, FixedInput | DeviceInput | LoaderInput, Callable[[Any, Tensor], Tensor]]:
    """The module on its device, its input and its loss: the user's own, or a classifier of images."""
    torch.manual_seed(0)
    memory_format = MEMORY_FORMATS[spec.memory_format]
    if is_own_model(spec.model):
        own = own_model(spec.model)
        torch.manual_seed(1 + rank)
        inputs, targets = own.batch(spec.process_batch_size)
        fixed = FixedInput((inputs.to(device), targets.to(device)), spec.steps_per_epoch)
        return own.module.to(device), fixed, own.loss
    model = build(spec.model).to(device, memory_format=memory_format)  # type: ignore[call-overload]
    images = partial(load_images, os.environ[DATA_VARIABLE] if spec.data != "synthetic" else None, spec.epoch_images)
    require_classifier(spec.model, model, images(), device)
    torch.manual_seed(1 + rank)  # what is drawn from now on, such as a loader's crops, is each rank's own
    return model, _image_input(spec, images, rank, device, memory_format), F.cross_entropy


def _image_input(
    spec: TrainingSpec, load: Callable[[], Images], rank: int, device: torch.device, memory_format: torch.memory_format
) -> FixedInput | DeviceInput | LoaderInput:
    batches = EpochBatches(
        spec.epoch_images,
        world_size=spec.processes,
        rank=rank if spec.grouped else 0,
        batch_size=spec.process_batch_size,
        drop_last=spec.drop_last,
    )
    if spec.input == "dataloader":
        return LoaderInput(load, batches, workers=spec.loader_workers, device=device, memory_format=memory_format)
    if spec.input == "device":
        return DeviceInput(load(), batches, device, memory_format)
    images, indices = load(), next(iter(batches))
    pixels = normalized(images.pixels[indices].to(device), memory_format)
    return FixedInput((pixels, images.labels[indices].to(device)), spec.steps_per_epoch)


def require_classifier(name: str, model: nn.Module, images: Images, device: torch.device) -> None:
    """Raise WrongModel unless the model has an output for each of the images' classes: on a GPU a label beyond them
    ends the process."""
    classes = int(images.labels.max()) + 1
    model.eval()
    with torch.no_grad():
        outputs = model(normalized(images.pixels[:2].to(device), torch.contiguous_format))
    model.train()
    if outputs.shape[-1] < classes:
        raise WrongModel(f"model {name} has {outputs.shape[-1]} outputs, the data set {classes} classes; name another model")


def allow_tf32(allowed: bool) -> None:
    """Switch TF32 on or off for every kind of operation by itself: by default convolutions use it, and in torch 2.11 the
    one setting for all leaves them as they are."""
    backends: Any = torch.backends
    backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"


def require_equal_parameters(model: nn.Module) -> None:
    """Raise RuntimeError on every rank unless all ranks hold bit-identical parameters."""
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
        least, greatest = bits.clone(), bits.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        if not torch.equal(least, greatest):
            raise RuntimeError(f"parameter {name} differs between ranks after training: gradients were not synchronized")
