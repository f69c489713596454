"""A trial: are two new kernels faster than today's all-reduce low_latency, and than NCCL?

pytest collects this file only if it is named, on two or more GPUs: pytest perf/trial_all_reduce.py.
The kernels run in Triton's interpreter (tests/ranks/test_low_latency.py). They have not run on GPUs
yet. If they are faster there, they replace the kernels in ddpperf/collectives/low_latency.py.

Like the kernels of low_latency, the new kernels write elements into mailboxes in the mapped memory
of other ranks. But no flag is sent. An element that has not arrived yet is EMPTY, the bits of one
NaN. A sender replaces this NaN by another one. So half as many bytes are sent as in words of an
element and a flag, and no block of elements waits for a flag.

- `one_phase` sends the whole buffer to every rank, which adds up all elements.
- `two_phase` sends each rank one part of the buffer. The rank adds up its part, and sends the sums
  to every rank. On four ranks it sends half as many bytes as one_phase, but waits twice.

Calls use three slots of the mailbox in turn. Each call makes the slot of the call before EMPTY
again. Another rank writes into this slot two calls later. It then has all elements of the call
between, which a rank sends only after the kernel of this call has ended. So all calls must be in one
stream, and a kernel must not start before the previous one has ended.

GPUs start thread blocks in order, so that the kernels also work if not all blocks run at once: each
block waits only for the same block of other ranks. At 16 MiB, not all blocks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ddpperf.analysis.bandwidth import all_reduce_busbw
from ddpperf.collectives.symmetric_memory import mapped_addresses, symmetric_buffer
from ddpperf.plugin.cases import Case, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import LOW_LATENCY_BYTES, Algorithm, AllReduceSpec, CustomCollectiveSpec

SLOTS = 3
ELEMENTS_PER_THREAD = 4  # 16 bytes, the most that a thread writes at once
SIZES = (2**14, 2**16, 2**18, 2**19, 2**20, 2**21, 2**22, 2**24)
MOST_BYTES = {"one_phase": 2**20, "two_phase": 2**24}


@triton.jit
def sent(values):  # type: ignore[no-untyped-def]  # Triton has its own meaning for annotations
    """Return the bits of float32 values, with another NaN in place of EMPTY."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits == -1, 0x7FC00000, bits)


@triton.jit
def arrived(bits, at, inside):  # type: ignore[no-untyped-def]
    """Wait until none of the elements is EMPTY, and return their bits.

    bits: what the first load returned. The kernels load all rows before they wait for one.
    """
    while tl.max((bits == -1).to(tl.int32)) > 0:
        bits = tl.load(at, mask=inside, other=0, volatile=True)
    return bits


@triton.jit
def mailbox_of(mailboxes, rank):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(mailboxes + rank).to(tl.pointer_type(tl.int32)), 16)


# rank is not specialized: all ranks need the same instructions
@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def one_phase_kernel(  # type: ignore[no-untyped-def]
    source, result, mailbox, mailboxes, calls, count, part, rank, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum a float32 buffer over all ranks by sending it to every rank.

    mailbox: SLOTS x N rows of `part` elements, the padded length of the buffer. mailboxes: the
    address of each rank's mailbox. calls: the number of earlier calls, for each thread block.
    """
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    filled = (call % 3).to(tl.int64) * N * part
    emptied = ((call + 2) % 3).to(tl.int64) * N * part

    boxes = ()
    for distance in tl.static_range(1, N):
        boxes += (mailbox_of(mailboxes, (rank + distance) % N),)  # type: ignore[assignment]
    own = sent(tl.load(source + at, mask=inside, other=0.0))
    for distance in tl.static_range(1, N):
        tl.store(boxes[distance - 1] + filled + rank * part + at, own, mask=inside)
    empty = tl.full((BLOCK,), -1, tl.int32)
    for distance in tl.static_range(1, N):
        tl.store(mailbox + emptied + (rank + distance) % N * part + at, empty, mask=inside)

    rows = ()
    for row in tl.static_range(N):
        bits = tl.load(
            mailbox + filled + row * part + at, mask=inside & (row != rank), other=0, volatile=True
        )
        rows += (bits,)  # type: ignore[assignment]
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.static_range(N):  # all ranks add up in the same order
        bits = own
        if row != rank:
            bits = arrived(rows[row], mailbox + filled + row * part + at, inside)
        total += bits.to(tl.float32, bitcast=True)
    tl.store(result + at, total, mask=inside)
    tl.store(calls + block, call)


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def two_phase_kernel(  # type: ignore[no-untyped-def]
    source, result, mailbox, mailboxes, calls, count, part, rank, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum a float32 buffer over all ranks, of which each adds up one part.

    mailbox: SLOTS x 2 x N rows of `part` elements: first this rank's part of the other ranks, then
    the sums of the other parts. The other parameters are those of one_phase_kernel.
    """
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    filled = (call % 3).to(tl.int64) * 2 * N * part
    emptied = ((call + 2) % 3).to(tl.int64) * 2 * N * part
    sums = N * part.to(tl.int64)

    boxes = ()
    parts = ()
    for distance in tl.static_range(1, N):
        other = (rank + distance) % N
        inside = (at < part) & (other * part + at < count)
        boxes += (mailbox_of(mailboxes, other),)  # type: ignore[assignment]
        parts += (tl.load(source + other * part + at, mask=inside, other=0.0),)  # type: ignore[assignment]
    mine = (at < part) & (rank * part + at < count)
    own = sent(tl.load(source + rank * part + at, mask=mine, other=0.0))
    for distance in tl.static_range(1, N):
        inside = (at < part) & ((rank + distance) % N * part + at < count)
        tl.store(boxes[distance - 1] + filled + rank * part + at, sent(parts[distance - 1]), mask=inside)
    empty = tl.full((BLOCK,), -1, tl.int32)
    for distance in tl.static_range(1, N):
        row = (rank + distance) % N * part
        tl.store(mailbox + emptied + row + at, empty, mask=at < part)
        tl.store(mailbox + emptied + sums + row + at, empty, mask=at < part)

    rows = ()
    for row in tl.static_range(N):
        bits = tl.load(mailbox + filled + row * part + at, mask=mine & (row != rank), other=0, volatile=True)
        rows += (bits,)  # type: ignore[assignment]
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.static_range(N):
        bits = own
        if row != rank:
            bits = arrived(rows[row], mailbox + filled + row * part + at, mine)
        total += bits.to(tl.float32, bitcast=True)
    bits = sent(total)
    for distance in tl.static_range(1, N):
        tl.store(boxes[distance - 1] + filled + sums + rank * part + at, bits, mask=mine)
    tl.store(result + rank * part + at, bits.to(tl.float32, bitcast=True), mask=mine)

    rows = ()
    for distance in tl.static_range(1, N):
        other = (rank + distance) % N
        inside = (at < part) & (other * part + at < count)
        place = mailbox + filled + sums + other * part + at
        rows += (tl.load(place, mask=inside, other=0, volatile=True),)  # type: ignore[assignment]
    for distance in tl.static_range(1, N):
        other = (rank + distance) % N
        inside = (at < part) & (other * part + at < count)
        bits = arrived(rows[distance - 1], mailbox + filled + sums + other * part + at, inside)
        tl.store(result + other * part + at, bits.to(tl.float32, bitcast=True), mask=inside)
    tl.store(calls + block, call)


KERNELS = {"one_phase": one_phase_kernel, "two_phase": two_phase_kernel}


def layout(kernel: str, count: int, N: int, block: int) -> tuple[int, int, int]:
    """Return the number of thread blocks, of elements of a part, and of elements of a mailbox."""
    phases = ("one_phase", "two_phase").index(kernel) + 1
    part = 16 * triton.cdiv(count if phases == 1 else triton.cdiv(count, N), 16)  # whole 16 bytes
    return triton.cdiv(part, block), part, SLOTS * phases * N * part


def launch(
    kernel: str,
    block: int,
    source: Tensor,
    result: Tensor,
    mailbox: Tensor,
    mailboxes: Tensor,
    calls: Tensor,
    rank: int,
) -> None:
    """Launch one kernel, with `block` elements for each thread block."""
    N, count = mailboxes.numel(), source.numel()
    blocks, part, _ = layout(kernel, count, N, block)
    KERNELS[kernel][(blocks,)](
        *(source, result, mailbox, mailboxes, calls, count, part, rank),
        N=N,
        BLOCK=block,
        num_warps=block // ELEMENTS_PER_THREAD // 32,
    )


def all_reduce(kernel: str, block: int) -> Callable[[Tensor], None]:
    """Return a function that sums a float32 buffer over all ranks in place."""
    prepared = WeakTensorKeyDictionary()  # a buffer and its mailbox live equally long on all ranks

    def sum_buffer(buffer: Tensor) -> None:
        if buffer not in prepared:
            prepared[buffer] = prepare(buffer.numel(), buffer.device)
        launch(kernel, block, buffer, buffer, *prepared[buffer][:-1])

    def prepare(count: int, device: torch.device) -> tuple[Any, ...]:
        rank, N = dist.get_rank(), dist.get_world_size()
        blocks, _, size = layout(kernel, count, N, block)
        mailbox = symmetric_buffer(size, torch.int32, device).fill_(-1)
        mailboxes, handle = mapped_addresses(mailbox)
        calls = torch.zeros(blocks, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        handle.barrier()  # all mailboxes are EMPTY
        torch.cuda.synchronize(device)
        return mailbox, mailboxes, calls, rank, handle

    return sum_buffer


one_phase_512, one_phase_1024 = (all_reduce("one_phase", block) for block in (512, 1024))
two_phase_512, two_phase_1024, two_phase_2048 = (
    all_reduce("two_phase", block) for block in (512, 1024, 2048)
)
TRIED = ("one_phase_512", "one_phase_1024", "two_phase_512", "two_phase_1024", "two_phase_2048")


def calls(options: Options) -> Iterator[Case]:
    """Yield the all-reduces of all GPUs in CUDA graphs, at each size by each kernel that sums it."""
    N = max(options.world_sizes)
    if options.device != "cuda" or N < 2:
        yield skipped("kernels", "the kernels need two GPUs")
        return
    today: tuple[Algorithm, ...] = ("backend", "two_shot", "low_latency")
    for nbytes in SIZES:
        for algorithm in today if nbytes <= LOW_LATENCY_BYTES else today[:2]:
            yield AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm, execution="graph")
        for name in TRIED:
            if nbytes <= MOST_BYTES[name.rpartition("_")[0]]:
                function = f"perf.trial_all_reduce:{name}"
                yield CustomCollectiveSpec(world_size=N, nbytes=nbytes, function=function, execution="graph")


@pytest.mark.specs(cases=calls)
def test_kernels(measure: Measure, spec: AllReduceSpec | CustomCollectiveSpec) -> None:
    """How long does an all-reduce take by each kernel, and at which bus bandwidth?"""
    seconds = measure(spec).median_step_seconds()
    busbw = {name: all_reduce_busbw(spec.nbytes, t, spec.world_size) for name, t in seconds.items()}
    measure.metric("busbw_bytes_per_second", busbw)
