"""Replay the all_reduces of DDP's gradient buckets without any forward or backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddpperf.measuring.compile_and_capture import capture
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import BucketReplaySpec
from ddpperf.training.comm_hooks import BucketMessage

ROOM = {torch.float16: 12}  # exponents below and above 0 that sums may reach; 120 for other types
# A missing all_reduce is an error of at least 2/5 (the first one, on 3 ranks: 3 for 5).
MOST_ROUNDED, MOST_TOLERATED = 0.25, 0.375


class BucketReplay(Measurement):
    """Measurement in which each step all_reduces buffers with the sizes of DDP's buckets.

    Elements start as 2**-ROOM on even ranks and as 3 * 2**-ROOM on odd ranks. After k steps an
    element is world_size**(k-1) times the sum of all ranks' start values, so that a missing
    all_reduce is noticed. If world_size is a power of two, the sums are, too. No addition then
    rounds, and elements must be exact. Else rounds are so short that rounding cannot hide a missing
    all_reduce. With comm_hook "avg" an element stays the mean of the start values, so that only a
    round without any all_reduce is noticed.
    """

    def __init__(
        self, spec: BucketReplaySpec, messages: list[BucketMessage], *, rank: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.messages = messages
        self.buffers = [torch.empty(count, dtype=dtype, device=device) for count, dtype in messages]
        self.operation = dist.ReduceOp.AVG if spec.comm_hook == "avg" else dist.ReduceOp.SUM
        self.growth = 1 if spec.comm_hook == "avg" else spec.world_size
        N, room = spec.world_size, min(ROOM.get(dtype, 120) for _, dtype in messages)
        self.start = (1 + 2 * (rank % 2)) * 2.0**-room
        self.sum = (N + 2 * (N // 2)) * 2.0**-room
        self.max_iterations = max(1, int(2 * room / math.log2(self.growth)) - 4) if self.growth > 1 else 1000
        eps = max(torch.finfo(dtype).eps for _, dtype in messages)
        self.exact = N & (N - 1) == 0 and N * eps <= 1  # each type has all whole numbers up to 2 / eps
        if not self.exact:  # a round has an untimed step, too
            self.max_iterations = max(1, min(self.max_iterations, int(MOST_ROUNDED / (N * eps)) - 1))
        self.run: Callable[[], None] = self.send

    def send(self) -> None:
        """Start all buckets' all_reduces before waiting for the first all_reduce, as DDP does."""
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
        """Raise ArithmeticError unless all buffers hold correct sums after `steps` all_reduces."""
        first = self.sum / (self.spec.world_size / self.growth)
        for number, buffer in enumerate(self.buffers):
            expected = first * self.growth ** (steps - 1)
            found = tuple(map(float, buffer.float().aminmax()))
            rounding = steps * self.spec.world_size * torch.finfo(buffer.dtype).eps
            tolerance = 0.0 if self.exact else min(rounding, MOST_TOLERATED)
            if not all(abs(value / expected - 1) <= tolerance for value in found):  # a NaN is wrong, too
                why = f"{found} after {steps} steps, where {expected} was expected"
                raise ArithmeticError(f"message {number} is wrong: {why}")

    def finish(self) -> dict[str, float]:
        """Return a step's gradient bytes, its number of all_reduces and each bucket's bytes."""
        nbytes = [float(count * dtype.itemsize) for count, dtype in self.messages]
        buckets = {f"bucket {number}: bytes": each for number, each in enumerate(nbytes)}
        return {"gradient_bytes": sum(nbytes), "messages": float(len(nbytes)), **buckets}
