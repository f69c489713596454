"""Timed collective calls on buffers with known results, so that every timed round is checked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.collectives.algorithms import ALGORITHMS, Transport, hierarchical
from ddpperf.collectives.symmetric_memory import CopyEngines, one_shot, symmetric_buffer, two_shot
from ddpperf.errors import CannotTrain
from ddpperf.measuring.compile_and_capture import capture
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.measuring.trace_split import communication_seconds, load_profiler, trace_of
from ddpperf.specs import AllReduceSpec, CollectiveSpec, CustomCollectiveSpec
from ddpperf.specs.collective import (
    EXACT_RANKS,
    FLOAT32_BYTES,
    GRAPH_CALLS,
    ONE_KERNEL,
    UNTRACED_CALLS,
    Call,
    rank_factors,
)
from ddpperf.specs.custom import import_function

MOST_GRAPHS = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# By element type: the elements after which a buffer repeats itself, and the least element of an all_reduce
_PATTERN = {"fp32": 13, "bf16": 13, "fp16": 5}
_SCALE = {"fp32": 2.0**-126, "bf16": 2.0**-126, "fp16": 2.0**-14}
_MOST_DISTINCT = 256  # whole numbers up to it are exact in every type
_CHECKED_AT_ONCE = 2**24  # elements: the check of a whole buffer could exceed the GPU's memory
# The functions of torch.distributed that take a result and a source
_OPERATIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_gather": dist.all_gather_into_tensor,
    "reduce_scatter": dist.reduce_scatter_tensor,
    "all_to_all": dist.all_to_all_single,
}


class RepeatedCall(Measurement):
    """Base class of timed collective calls, issued one by one or as a CUDA graph of several calls.

    A CUDA graph holds GRAPH_CALLS calls. A round has at most MOST_GRAPHS graphs, so that a slow CPU
    launches them all while the rank keeps the GPU busy. Subclasses set `call`, the timed function.
    `start_round` fills the buffers and `end_round` checks the result.
    """

    call: Callable[[], object]

    def __init__(self, spec: Call, *, rank: int, device: torch.device) -> None:
        if device.type != "cuda" and (spec.captured or spec.maps_memory):
            raise ValueError(f"{spec.id} needs GPUs; this runs on the CPU")
        self.spec, self.rank, self.device, self.dtype = spec, rank, device, DTYPES[spec.dtype]
        if spec.captured:
            self.max_iterations = MOST_GRAPHS
        self._replay: Callable[[], object] | None = None

    @property
    def count(self) -> int:
        """The number of elements of a rank's buffer."""
        return self.spec.nbytes // self.dtype.itemsize

    def pattern(self, count: int, factor: float = 1.0) -> Tensor:
        """Return a tensor of `count` elements that repeats the powers of two from `factor` on.

        A power of two times a small whole number is exact in every type.
        """
        size = _PATTERN[self.spec.dtype]
        numbers = (factor * 2.0 ** torch.arange(size, device=self.device)).to(self.dtype)
        return numbers.repeat(math.ceil(count / size))[:count]

    def step(self) -> None:
        (self._replay or self.call)()

    @property
    def profiled(self) -> bool:
        """Whether `finish` traces the kernel of a call."""
        one_kernel = getattr(self.spec, "algorithm", "backend") in ONE_KERNEL
        return one_kernel and self.device.type == "cuda" and UNTRACED_CALLS not in os.environ

    def warm_up(self, steps: int) -> None:
        if self.profiled:
            load_profiler(self.device)
        for _ in range(steps):
            self.call()
        if self.spec.captured:
            self._replay = capture(self._call_often, self.spec.execution).replay

    def _call_often(self) -> None:
        for _ in range(GRAPH_CALLS):
            self.call()

    def finish(self) -> dict[str, float]:
        """Return `kernel_seconds`, the median GPU time of a collective call's kernel.

        The result is empty on the CPU, without a profiler, and for algorithms of several kernels.
        """
        if not self.profiled:
            return {}
        self.start_round()
        seconds = communication_seconds(trace_of(self._replay or self._call_often, self.device))
        return {"kernel_seconds": median(seconds)} if seconds else {}


class AllReduce(RepeatedCall):
    """Timed all-reduce of a buffer, whose result is checked after each round.

    The buffer has `spec.nbytes` bytes. The sum replaces it or goes to another buffer. Element i of
    rank r starts as f(r) 2**(i % 13 - 126), of fp16 as f(r) 2**(i % 5 - 14), with small factors f(r).
    After k calls in place the result is world_size**(k-1) times the sum of the starts.
    `max_iterations` keeps the result within the range of the type, so that zeros and infinities are
    never timed. If sums in place are rounded so much that a missing rank could be overlooked, each
    round begins with a single call, whose sum is exact.
    """

    def __init__(
        self, spec: AllReduceSpec | CustomCollectiveSpec, *, rank: int, device: torch.device
    ) -> None:
        super().__init__(spec, rank=rank, device=device)
        self.in_place = spec.in_place
        N = spec.world_size
        if spec.in_place:
            room = spec.calls_in_range // spec.calls - 1
            self.max_iterations = max(1, min(self.max_iterations, room))
        self.factors = rank_factors(N)
        exact = spec.dtype == "fp32" or (N <= EXACT_RANKS and N.bit_count() == 1)
        self.checks_first = spec.in_place and not exact
        count = self.count
        self.start = self.pattern(count, self.factors[rank] * _SCALE[spec.dtype])
        make = symmetric_buffer if spec.maps_memory and spec.algorithm != "low_latency" else torch.empty
        self.result = self.buffer = make(count, dtype=self.dtype, device=device)
        reduce = _all_reduce(spec, self.buffer)
        refill = isinstance(spec, AllReduceSpec) and spec.copies

        def call() -> None:
            if refill:
                self.buffer.copy_(self.start)
            self.result = reduce()

        self.call = call

    def start_round(self) -> None:
        self._fill()
        if self.checks_first:
            self.call()
            self._check(1, 2.0**-20)
            self._fill()

    def _fill(self) -> None:
        self.buffer.copy_(self.start)
        if self.result is not self.buffer:
            self.result.fill_(-1)  # so that an earlier round's result cannot pass the check

    def end_round(self, steps: int) -> None:
        """Raise ArithmeticError unless a round of `steps` all-reduces gave the right sum."""
        calls, N = steps * self.spec.calls if self.in_place else 1, self.spec.world_size
        tolerance = calls * N * torch.finfo(self.dtype).eps  # each rank's addition rounds by half of it
        if self.dtype.itemsize < FLOAT32_BYTES:
            tolerance = min(tolerance, 0.5) if self.checks_first else 2.0**-20
        self._check(calls, tolerance)

    def _check(self, calls: int, tolerance: float) -> None:
        """Raise ArithmeticError unless the result after some calls is right, within a relative tolerance."""
        # scaled back in two halves: the whole power may not fit into float32
        back = float(self.spec.world_size) ** (-(calls - 1) / 2)
        for at in range(0, len(self.start), _CHECKED_AT_ONCE):
            part = slice(at, at + _CHECKED_AT_ONCE)
            result, first_sum = self.result[part].float(), self.first_sum(self.start[part])
            error = (result * back).mul_(back).div_(first_sum).sub_(1).abs_()
            if not bool(error.max() <= tolerance):  # a comparison with NaN is False
                index = int(error.argmax())
                found, expected = result[index].item(), first_sum[index].item() / back / back
                raise ArithmeticError(_wrong("all_reduce", calls, at + index, found, expected))

    def first_sum(self, start: Tensor) -> Tensor:
        """Return the exact sum over all ranks after one call, in float32.

        start: a part of this rank's buffer before the call.
        """
        return (start.float() / self.factors[self.rank]).mul_(sum(self.factors))


def _all_reduce(spec: AllReduceSpec | CustomCollectiveSpec, buffer: Tensor) -> Callable[[], Tensor]:
    """Return a function that all-reduces a buffer and returns the result.

    The sum replaces the buffer, except that one_shot and low_latency can put it elsewhere.
    """
    if isinstance(spec, CustomCollectiveSpec):
        return partial(_checked, import_function(spec.function, "collective"), spec.function, buffer)
    if spec.algorithm == "low_latency":
        from ddpperf.collectives.low_latency import LowLatency  # a torch for the CPU may lack Triton

        return LowLatency(buffer, buffer if spec.in_place else torch.empty_like(buffer)).sum
    if spec.algorithm == "copy_engine":
        return CopyEngines(buffer).sum
    if spec.algorithm == "two_shot":
        return lambda: two_shot(buffer)
    if spec.algorithm == "one_shot":
        return (lambda: buffer.copy_(one_shot(buffer))) if spec.in_place else lambda: one_shot(buffer)
    transport = Transport() if spec.algorithm != "backend" else None

    def reduce() -> Tensor:
        if transport is None:
            dist.all_reduce(buffer)
        elif spec.node_size:
            hierarchical(buffer, transport, node_size=spec.node_size)
        else:
            ALGORITHMS[spec.algorithm](buffer, transport)
        return buffer

    return reduce


def _checked(function: Callable[[Tensor], object], name: str, buffer: Tensor) -> Tensor:
    """Call a user's all-reduce, and raise CannotTrain if it changes more than the buffer's values."""
    shape, dtype = tuple(buffer.shape), buffer.dtype
    function(buffer)
    if buffer.dtype != dtype or buffer.shape != shape:
        got = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
        kept = f"keep a {dtype} buffer of shape {shape}, got {got}"
        raise CannotTrain(f"collective {name} must {kept}; change its values only")
    return buffer


class Collective(RepeatedCall):
    """Timed all-gather, reduce-scatter, all-to-all or broadcast by NCCL, gloo or a user's function.

    The broadcast has one buffer, the other collectives have a source and a result. Element i of
    rank r's buffer is a power of two times a small whole number, which each type adds up exactly.
    """

    def __init__(
        self, spec: CollectiveSpec | CustomCollectiveSpec, *, rank: int, device: torch.device
    ) -> None:
        super().__init__(spec, rank=rank, device=device)
        count, N = self.count, spec.world_size
        part = slice(rank * count // N, (rank + 1) * count // N)  # this rank's part of the buffer
        factors = [1 + rank % _MOST_DISTINCT for rank in range(N)]
        if spec.kind == "reduce_scatter" and spec.dtype != "fp32":
            factors = rank_factors(N)
        pattern = self.pattern(count)
        self.source = pattern * factors[rank]
        self.result = torch.empty_like(self.source)
        own = import_function(spec.function, "collective") if isinstance(spec, CustomCollectiveSpec) else None
        if spec.kind == "all_gather":
            parts = [self.pattern(count // N, factor) for factor in factors]
            self.source, self.expected = parts[rank], torch.cat(parts)
        elif spec.kind == "reduce_scatter":
            self.expected = (pattern * sum(factors))[part]
            self.result = torch.empty_like(self.expected)
        elif spec.kind == "all_to_all":
            self.expected = torch.cat([pattern[part] * factor for factor in factors])
        else:
            self.result, self.expected = self.source, pattern
            broadcast = own or partial(dist.broadcast, src=0)
            self.call = lambda: broadcast(self.result)
            return
        operation = own or _OPERATIONS[spec.kind]
        self.call = lambda: operation(self.result, self.source)

    def start_round(self) -> None:
        self._clear_result()
        if isinstance(self.spec, CustomCollectiveSpec):
            self.call()
            self.end_round(1)  # at once: a function that returns too early has no result yet
            self._clear_result()

    def _clear_result(self) -> None:
        if self.result is not self.source or self.rank:  # rank 0 broadcasts its buffer
            self.result.fill_(-1)  # so that an earlier round's result cannot pass the check

    def end_round(self, steps: int) -> None:
        """Raise ArithmeticError unless the collective's result equals the expected tensor."""
        result = self.result.clone()  # what is there now; more may arrive while it is compared
        if not torch.equal(result, self.expected):
            index = int((result != self.expected).nonzero()[0])
            found, expected = result[index].item(), self.expected[index].item()
            raise ArithmeticError(_wrong(self.spec.id, steps, index, found, expected))


def custom_collective(
    spec: CustomCollectiveSpec, *, rank: int, device: torch.device
) -> AllReduce | Collective:
    """Return the measurement of a user's own collective."""
    kind = AllReduce if spec.kind == "all_reduce" else Collective
    return kind(spec, rank=rank, device=device)


def _wrong(name: str, steps: int, index: int, found: float, expected: float) -> str:
    what = f"after {steps} steps element {index} is {found!r} where {expected!r} was expected"
    return f"{name} is wrong: {what}"
