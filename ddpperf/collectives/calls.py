"""Collectives on buffers whose results are known, so that every timed round is also checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.collectives import algorithms as allreduce
from ddpperf.collectives.symmetric_memory import CopyEngines, one_shot, symmetric_buffer, two_shot
from ddpperf.collectives.transports import GroupTransport
from ddpperf.execution import capture
from ddpperf.instruments.trace import communication_seconds, trace_of
from ddpperf.specs import FLOAT32_BYTES, GRAPH_CALLS, ONE_KERNEL, AllReduceSpec, CollectiveSpec

_SCALE_EXPONENT = -120  # where a buffer starts: the sums then have room to grow by 2**240 within float32
_ROOM_EXPONENT = 230
_PATTERN = 13  # elements after which a buffer repeats itself


class Repeated:
    """A call that is repeated, by itself or in a graph of GRAPH_CALLS of them. `call` is what is timed.

    start_round: fills the buffers with what they begin with. Subclasses check in end_round what it made of them.
    """

    max_iterations = 1000
    call: Callable[[], object]

    def __init__(self, spec: AllReduceSpec | CollectiveSpec, *, rank: int, device: torch.device) -> None:
        if spec.captured and device.type != "cuda":
            raise ValueError(
                f"execution {spec.execution} is captured by a GPU's driver; this runs on the CPU"
            )
        self.spec = spec
        self.rank = rank
        self.device = device
        self.world_size = spec.world_size
        self.run: Callable[[], object] = lambda: self.call()

    def pattern(self, count: int) -> Tensor:
        """1, 2, ..., 13, 1, ..."""
        return (torch.arange(count, device=self.device) % _PATTERN + 1).float()

    def start_round(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        self.run()

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.call()
        if self.spec.captured:
            self.run = capture(self.call_often, self.spec.execution).replay

    def call_often(self) -> None:
        for _ in range(GRAPH_CALLS):
            self.call()

    def finish(self) -> dict[str, float]:
        """kernel_seconds: of the library's own kernel in a call, a median; absent on the CPU, of our algorithms, which call
        several, or if nothing can be profiled."""
        if self.device.type != "cuda" or getattr(self.spec, "algorithm", "backend") not in ONE_KERNEL:
            return {}
        self.start_round()
        seconds = communication_seconds(
            trace_of(self.run if self.spec.captured else self.call_often, self.device)
        )
        return {"kernel_seconds": median(seconds)} if seconds else {}


class AllReduce(Repeated):
    """A float32 buffer of `spec.nbytes` bytes on each rank, and the sum over all ranks, in its place or in another buffer.

    Element i of rank r starts as (i % 13 + 1 + r) * 2**-120, so k steps in place leave world_size**(k-1) times the sum of the
    starts. A round may have so many steps that this stays a finite float32: no zeros, no infinities are ever timed.
    """

    def __init__(self, spec: AllReduceSpec, *, rank: int, device: torch.device) -> None:
        super().__init__(spec, rank=rank, device=device)
        self.in_place = spec.in_place
        if spec.in_place:
            self.max_iterations = max(1, int(_ROOM_EXPONENT / math.log2(self.world_size)) // spec.calls - 1)
        count = spec.nbytes // FLOAT32_BYTES
        scale = 2.0**_SCALE_EXPONENT
        pattern = self.pattern(count) * scale
        self.start = pattern + rank * scale
        self.first_sum = pattern * self.world_size + self.world_size * (self.world_size - 1) / 2 * scale
        self.buffer, reduce = operation(spec, count, device)
        self.result = self.buffer

        copied = not spec.in_place and spec.algorithm not in (
            "one_shot",
            "low_latency",
        )  # these leave the buffer as it is

        def call() -> None:
            if copied:
                self.buffer.copy_(self.start)
            self.result = reduce()

        self.call = call

    def start_round(self) -> None:
        self.buffer.copy_(self.start)
        if self.result is not self.buffer:
            self.result.fill_(-1)  # or an earlier round's could pass for this one's

    def end_round(self, steps: int) -> None:
        """Raise ArithmeticError unless the result is what `steps` sums over all ranks must give."""
        calls = steps * self.spec.calls if self.in_place else 1
        back = float(self.world_size) ** (
            -(calls - 1) / 2
        )  # in two halves: the whole power may not fit in float32
        error = ((self.result * back).mul_(back) / self.first_sum).sub_(1).abs_()
        tolerance = (
            calls * self.world_size * 2.0**-23
        )  # at most a rounding for each rank in each step, of 2**-24
        if not bool(error.max() <= tolerance):  # a NaN is never at most anything
            index = int(error.argmax())
            raise ArithmeticError(
                f"all_reduce is wrong: after {calls} steps element {index} is {self.result[index].item()!r} "
                f"where {self.first_sum[index].item() / back / back!r} was expected"
            )


def operation(spec: AllReduceSpec, count: int, device: torch.device) -> tuple[Tensor, Callable[[], Tensor]]:
    """A buffer, and what sums it over all ranks; in place but for one_shot, whose sum is copied back if it must be."""
    if spec.maps_memory:
        if device.type != "cuda":
            raise ValueError(f"algorithm {spec.algorithm} maps the memory of GPUs; this runs on the CPU")
        if spec.algorithm == "low_latency":
            from ddpperf.collectives.low_latency import (
                LowLatency,
            )  # only here: a build for the CPU may lack Triton

            buffer = torch.empty(count, device=device)
            return buffer, LowLatency(buffer, buffer if spec.in_place else torch.empty_like(buffer)).sum
        shared = symmetric_buffer(count, torch.float32, device)
        if spec.algorithm == "copy_engine":
            return shared, CopyEngines(shared).sum
        if spec.algorithm == "two_shot":
            return shared, lambda: two_shot(shared)
        return shared, (lambda: shared.copy_(one_shot(shared))) if spec.in_place else (
            lambda: one_shot(shared)
        )
    buffer = torch.empty(count, device=device)
    transport = GroupTransport() if spec.algorithm != "backend" else None

    def reduce() -> Tensor:
        if transport is None:
            dist.all_reduce(buffer)
        else:
            allreduce.all_reduce(buffer, spec.algorithm, transport)
        return buffer

    return buffer, reduce


class Collective(Repeated):
    """Another collective of the backend, from a buffer that stays as it is into another one; broadcast has one buffer.

    Element i of rank r's buffer is i % 13 + 1 + r; a whole number, which float32 adds up exactly.
    """

    def __init__(self, spec: CollectiveSpec, *, rank: int, device: torch.device) -> None:
        super().__init__(spec, rank=rank, device=device)
        whole = spec.nbytes // FLOAT32_BYTES
        N, share = self.world_size, whole // self.world_size
        own = self.pattern(whole) + rank
        self.source, self.result = own, torch.empty_like(own)
        if spec.kind == "all_gather":
            self.source = self.pattern(share) + rank
            self.expected = torch.cat([self.pattern(share) + other for other in range(N)])
            self.call = lambda: dist.all_gather_into_tensor(self.result, self.source)
        elif spec.kind == "reduce_scatter":
            self.result = torch.empty(share, device=device)
            self.expected = (self.pattern(whole) * N + N * (N - 1) / 2)[rank * share : (rank + 1) * share]
            self.call = lambda: dist.reduce_scatter_tensor(self.result, self.source)
        elif spec.kind == "all_to_all":
            sent = (self.pattern(whole) + other for other in range(N))
            self.expected = torch.cat([each[rank * share : (rank + 1) * share] for each in sent])
            self.call = lambda: dist.all_to_all_single(self.result, self.source)
        else:
            self.result = own
            self.expected = self.pattern(whole)
            self.call = lambda: dist.broadcast(self.result, 0)

    def start_round(self) -> None:
        """What an earlier round left must not be taken for this one's; of a broadcast rank 0 has the source."""
        if self.result is not self.source or self.rank:
            self.result.fill_(-1)

    def end_round(self, steps: int) -> None:
        """Raise ArithmeticError unless the result is what it must be, whatever the number of steps."""
        if not torch.equal(self.result, self.expected):
            index = int((self.result != self.expected).nonzero()[0])
            raise ArithmeticError(
                f"{self.spec.id} is wrong: after {steps} steps element {index} is {self.result[index].item()!r} "
                f"where {self.expected[index].item()!r} was expected"
            )
