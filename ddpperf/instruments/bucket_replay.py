"""A step's messages by themselves: the all_reduces of DDP's buckets, in their order, with nothing computed beside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.execution import capture
from ddpperf.specs import BucketReplaySpec
from ddpperf.training.comm_hooks import Message, OwnAverage
from ddpperf.training.strategies import parallelize
from ddpperf.training.task import task

LEARNING_STEPS = 3  # DDP arranges its buckets anew after the first
ROOM = {torch.float16: 12}  # powers of two below and above 1 that sums may use, of other types 120


class BucketReplay:
    """`step` sums, or averages, the buckets that a step of the same training sends, one after the other on one stream.

    Element values of rank r start as (1 + r) * 2**-ROOM, so k steps leave world_size**(k-1) times the sum of the starts, and
    what was not sent shows.
    """

    def __init__(self, spec: BucketReplaySpec, *, rank: int, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.messages = messages_of(spec, rank, device)
        self.buffers = [torch.empty(count, dtype=dtype, device=device) for count, dtype in self.messages]
        self.operation = dist.ReduceOp.AVG if spec.comm_hook == "avg" else dist.ReduceOp.SUM
        self.growth = 1 if spec.comm_hook == "avg" else spec.world_size
        room = min(ROOM.get(dtype, 120) for _, dtype in self.messages)
        self.scale = 2.0**-room
        self.start = (1 + rank) * self.scale
        self.sum = self.scale * spec.world_size * (spec.world_size + 1) / 2
        self.max_iterations = max(1, int(2 * room / math.log2(self.growth)) - 4) if self.growth > 1 else 1000
        self.run: Callable[[], None] = self.send

    def send(self) -> None:
        """Every message is given to the backend before the first is waited for, as DDP does."""
        for work in [dist.all_reduce(buffer, self.operation, async_op=True) for buffer in self.buffers]:
            work.wait()

    def step(self) -> None:
        self.run()

    def warm_up(self, steps: int) -> None:
        self.start_round()
        for _ in range(min(steps, self.max_iterations)):
            self.send()
        if self.spec.captured:
            self.run = capture(self.send, self.spec.execution).replay

    def start_round(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(self.start)

    def end_round(self, steps: int) -> None:
        """Raise ArithmeticError unless each buffer holds what `steps` reductions over all ranks must give."""
        first = self.sum / (self.spec.world_size / self.growth)
        for number, buffer in enumerate(self.buffers):
            expected, found = first * self.growth ** (steps - 1), _extremes(buffer)
            if not all(
                abs(value / expected - 1) <= steps * self.spec.world_size * torch.finfo(buffer.dtype).eps
                for value in found
            ):
                raise ArithmeticError(
                    f"message {number} is wrong: {found} after {steps} steps, where {expected} was expected"
                )

    def finish(self) -> dict[str, float]:
        """gradient_bytes: of all messages of a step. messages: how many they are. bucket 0, ...: of each the bytes."""
        nbytes = [float(count * dtype.itemsize) for count, dtype in self.messages]
        buckets = {f"bucket {number}: bytes": each for number, each in enumerate(nbytes)}
        return {"gradient_bytes": sum(nbytes), "messages": float(len(nbytes)), **buckets}


def messages_of(spec: BucketReplaySpec, rank: int, device: torch.device) -> list[Message]:
    """What a step of the training sends, as its DDP hands it to a hook: elements and type of each bucket, in their order."""
    model, source, loss_of = task(spec, rank, device)
    hook = OwnAverage(spec, device)
    ddp = parallelize(model, spec, device, hook=hook)
    for _ in range(LEARNING_STEPS):
        source.begin(0)  # each time: an epoch may have one batch only
        source.load()
        inputs, targets = source.take()
        loss_of(ddp(inputs), targets).backward()
        ddp.zero_grad()
    return hook.messages


def _extremes(buffer: Tensor) -> tuple[float, float]:
    least, greatest = buffer.float().aminmax()
    return float(least), float(greatest)
