"""One step of data-parallel training, as short as it can be written, ready to be repeated and timed."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpperf.data import synthetic_batch
from ddpperf.models import MODELS
from ddpperf.specs import TrainingSpec

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_STEPS = 5  # while the loss on the one batch still falls; after 20 it is near 0 in any precision


class TrainingStep:
    """Model, optimizer and one fixed batch of `rank`, on `device`; `step` trains on it once.

    Every rank starts from the same parameters and has a batch of its own, so that equal parameters afterwards show
    that the gradients were synchronized.
    """

    max_iterations = 1000

    def __init__(self, spec: TrainingSpec, *, rank: int, device: torch.device) -> None:
        allow_tf32(spec.precision == "tf32")
        self.autocast_dtype = AUTOCAST_DTYPES.get(spec.precision)
        torch.manual_seed(0)
        self.device = device
        self.model: nn.Module = MODELS[spec.model]().to(device)
        self.synchronized = spec.strategy == "ddp"
        if self.synchronized:
            self.model = DistributedDataParallel(self.model, device_ids=[device] if device.type == "cuda" else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        images, labels = synthetic_batch(spec.per_rank_batch_size, seed=rank)
        self.images, self.labels = images.to(device), labels.to(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")
        self.loss = torch.empty((), device=device)
        self.early_loss = self.loss
        self.steps = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def start_round(self) -> None:
        """Nothing to prepare: each round trains on."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            self.loss = F.cross_entropy(self.model(self.images), self.labels)
        self.scaler.scale(self.loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1
        if self.steps == LOSS_STEPS:
            self.early_loss = self.loss.detach()

    def end_round(self, steps: int) -> None:
        """Raise FloatingPointError unless the loss is a finite number: NaN computes at another speed."""
        loss = self.loss.item()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} after a round of {steps} steps")

    def finish(self) -> dict[str, float]:
        """Counters of this rank; raises RuntimeError if its parameters are not the other ranks'.

        loss_after_5_steps: of training on the one batch from the start, to lay beside a precision's speed.
        """
        while self.steps < LOSS_STEPS:
            self.step()
        if self.synchronized:
            require_equal_parameters(self.model)
        counters = {f"loss_after_{LOSS_STEPS}_steps": self.early_loss.item()}
        if self.device.type == "cuda":
            counters["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
        return counters


def allow_tf32(allowed: bool) -> None:
    """Switch TF32 on or off for every kind of operation by itself: by default convolutions use it, and in torch 2.11 the
    one setting for all leaves them as they are."""
    backends: Any = torch.backends
    backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"


def require_equal_parameters(model: nn.Module) -> None:
    """Raise RuntimeError on every rank unless all ranks hold bit-identical parameters."""
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().view(torch.int32)
        least, greatest = bits.clone(), bits.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        if not torch.equal(least, greatest):
            raise RuntimeError(f"parameter {name} differs between ranks after training: gradients were not synchronized")
