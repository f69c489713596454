"""A low-latency all-reduce: one Triton kernel for each call, without a barrier and without flags.

Each rank writes elements into mailboxes in the mapped memory of all ranks, and adds up what arrives
in its own mailbox. A place whose element has not arrived holds EMPTY, the bits of a NaN. If a value
has these bits, the sender sends a different NaN. So no flags are sent, and no element waits for one.

With one phase, each rank sends its whole buffer to every rank, which adds up all elements. With two
phases, each rank sends every rank one part of its buffer. Each rank adds up its part, and then sends
the sums to every rank. On four ranks this sends half as many bytes, but waits twice.

Calls use three slots of the mailbox in turn. Call k fills its slot, and makes the slot of call k-1
EMPTY again. Other ranks write into that slot in call k+2. They have then received this rank's
elements of call k+1, which it sends only after its kernel of call k has ended. So all calls must be
in one stream, and a kernel must not start before the previous one has ended.

A thread block waits only for the same block of the other ranks. In practice, GPUs start blocks in
order, so that the kernels also work if not all blocks run at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import triton
import triton.language as tl
from torch import Tensor

from ddpperf.collectives.symmetric_memory import group_name, symmetric_buffer
from ddpperf.specs.collective import FLOAT32_BYTES

EMPTY = tl.constexpr(-1)
OTHER_NAN = tl.constexpr(0x7FC00000)
SLOTS = tl.constexpr(3)
ONE_PHASE_BYTES = 2**17  # the largest buffer for which one phase is faster on four H100s
SMALL_BYTES = 2**20  # the largest buffer with small thread blocks
SMALL_BLOCK, BLOCK = 128, 512  # elements for each thread block
ELEMENTS_PER_THREAD = 4  # 16 bytes, the most that a thread writes at once


@triton.jit
def sent(values):  # type: ignore[no-untyped-def]  # Triton has its own meaning for annotations
    """Return the bits of float32 values, in which another NaN replaces EMPTY."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits == EMPTY, OTHER_NAN, bits)


@triton.jit
def arrived(at, inside):  # type: ignore[no-untyped-def]
    """Wait until no element is EMPTY, and return the float32 values."""
    bits = tl.load(at, mask=inside, other=0, volatile=True)
    while tl.max((bits == EMPTY).to(tl.int32)) > 0:
        bits = tl.load(at, mask=inside, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mailboxes_from(mailboxes, ranks):  # type: ignore[no-untyped-def]
    """Return the addresses of the mailboxes of some ranks, as a column."""
    return tl.multiple_of(tl.load(mailboxes + ranks).to(tl.pointer_type(tl.int32)), 16)[:, None]


# rank is not specialized, so that all ranks run the same instructions and add up in the same order
@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def low_latency_all_reduce(  # type: ignore[no-untyped-def]
    source,
    result,
    mailbox,
    mailboxes,
    slots,
    count,
    part,
    rank,
    N: tl.constexpr,
    PHASES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a float32 buffer over all ranks.

    mailbox: SLOTS x PHASES x N rows of `part` elements: what the ranks send first, then the sums of
    all parts. With one phase, the only part is the whole buffer. Parts are padded, and the padding is
    sent, too. mailboxes: the address of each rank's mailbox. slots: the slot of this call, for each
    thread block. ROWS: N rounded up to a power of two.
    """
    block = tl.program_id(0)
    slot, sums = tl.load(slots + block), N * part
    filled, emptied = slot * PHASES * sums, (slot + SLOTS - 1) % SLOTS * PHASES * sums
    rows, at = tl.arange(0, ROWS), block * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < N)[:, None] & (at < part)[None, :]
    row_at = rows[:, None] * part + at[None, :]
    other = (rank + rows) % N  # each rank begins with another mailbox
    theirs = mailboxes_from(mailboxes, other) + filled + rank * part + at[None, :]

    if PHASES == 1:
        bits = sent(tl.load(source + at, mask=at < count, other=0.0))[None, :]
    else:
        part_at = other[:, None] * part + at[None, :]
        bits = sent(tl.load(source + part_at, mask=inside & (part_at < count), other=0.0))
    tl.store(theirs, bits, mask=inside)
    tl.store(mailbox + emptied + row_at, EMPTY, mask=inside)
    if PHASES == 2:
        tl.store(mailbox + emptied + sums + row_at, EMPTY, mask=inside)
    total = tl.sum(arrived(mailbox + filled + row_at, inside), 0)

    if PHASES == 1:
        tl.store(result + at, total, mask=at < count)
    else:
        tl.store(theirs + sums, sent(total)[None, :], mask=inside)
        totals = arrived(mailbox + filled + sums + row_at, inside)
        tl.store(result + row_at, totals, mask=inside & (row_at < count))
    tl.store(slots + block, (slot + 1) % SLOTS)


def choose(count: int, N: int) -> tuple[int, int]:
    """Return the faster number of phases, 1 or 2, and the number of elements per thread block.

    On two ranks, both numbers of phases send the same number of bytes, but one phase waits once.
    """
    nbytes = count * FLOAT32_BYTES
    phases = 1 if N == 2 or nbytes <= ONE_PHASE_BYTES else 2
    return phases, SMALL_BLOCK if nbytes <= SMALL_BYTES else BLOCK


def layout(phases: int, block: int, count: int, N: int) -> tuple[int, int, int]:
    """Return the number of thread blocks, elements per part, and elements per mailbox."""
    elements = count if phases == 1 else triton.cdiv(count, N)
    part = 16 * triton.cdiv(elements, 16)  # Triton knows multiples of 16, and then sends 16 bytes at once
    return triton.cdiv(part, block), part, SLOTS.value * phases * N * part


def launch(
    phases: int,
    block: int,
    source: Tensor,
    result: Tensor,
    mailbox: Tensor,
    mailboxes: Tensor,
    slots: Tensor,
    rank: int,
) -> None:
    """Launch the kernel.

    block: the elements for each thread block. The other parameters are those of the kernel.
    """
    N, count = mailboxes.numel(), source.numel()
    blocks, part, _ = layout(phases, block, count, N)
    low_latency_all_reduce[(blocks,)](
        *(source, result, mailbox, mailboxes, slots, count, part, rank),
        N=N,
        PHASES=phases,
        ROWS=triton.next_power_of_2(N),
        BLOCK=block,
        num_warps=block // ELEMENTS_PER_THREAD // 32,
    )


class LowLatency:
    """A low-latency all-reduce, which writes the sum of `source` over all ranks to `result`.

    source, result: float32 [count] of at most LOW_LATENCY_BYTES, anywhere on the GPU. They may be
    the same tensor. All ranks of the default group create one object together and call `sum`
    equally often. The sums are bit-identical on all ranks. The mailbox takes 6 times the memory of
    the buffer, or 3 N times up to ONE_PHASE_BYTES.
    """

    def __init__(self, source: Tensor, result: Tensor) -> None:
        rank, N, device = dist.get_rank(), dist.get_world_size(), source.device
        phases, block = choose(source.numel(), N)
        blocks, _, size = layout(phases, block, source.numel(), N)
        mailbox = symmetric_buffer(size, torch.int32, device).fill_(EMPTY.value)
        self.handle: Any = symmetric_memory.rendezvous(mailbox, group_name())  # keeps it mapped
        offset = mailbox.data_ptr() - self.handle.buffer_ptrs[rank]  # in its allocation
        addresses = [base + offset for base in self.handle.buffer_ptrs]
        mailboxes = torch.tensor(addresses, dtype=torch.int64, device=device)
        slots = torch.zeros(blocks, dtype=torch.int32, device=device)
        self.result = result
        self.arguments = phases, block, source, result, mailbox, mailboxes, slots, rank
        torch.cuda.synchronize(device)
        self.handle.barrier()  # all mailboxes are EMPTY
        torch.cuda.synchronize(device)

    def sum(self) -> Tensor:
        """Launch the all-reduce on the current CUDA stream and return the result tensor."""
        launch(*self.arguments)
        return self.result
