"""A low-latency all-reduce for small buffers, in one Triton kernel and without a barrier.

Each rank writes its elements into a mailbox in the mapped memory of every other rank. It then adds
its own elements and those that arrive in its mailbox. The price is that each rank sends its whole
buffer to every other rank.

There are two kernels. For the smallest buffers, each word of 8 bytes holds an element of 4 bytes
and a flag of 4 bytes, as in NCCL's protocol LL. A GPU writes and reads a word as a whole, so that a
reader who sees the flag has the element. This doubles the bytes that are sent. For larger buffers a
flag follows each block of elements, as in NCCL's protocol Simple.

A thread block sends all its elements before it waits, and then waits only for the same block of the
other ranks. GPUs start blocks in order, so that the kernel also works if not all blocks run at once.
An H200 runs all 256 blocks (of 512 threads) of a 4 MiB buffer at once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from ddpperf.collectives.symmetric_memory import mapped_addresses, symmetric_buffer
from ddpperf.specs import FLOAT32_BYTES

WORDS_BYTES = 2**18  # the largest buffer that is sent in words
WORDS_BLOCK, FLAGGED_BLOCK = 128, 4096  # elements for each thread block
FLAGGED_WARPS = 16
# Calls use two slots of the mailbox in turn. A rank is at most one call ahead of another rank, since
# each call needs the other rank's elements.
SLOTS = 2


# rank is not specialized: all ranks need the same instructions
@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def words_kernel(  # type: ignore[no-untyped-def]  # Triton has its own meaning for annotations
    source,
    result,
    mailbox,
    mailboxes,
    calls,
    count,
    slot,
    rank,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a float32 buffer over all ranks, sending each element and a flag as one word of 8 bytes.

    A rank sends its elements to its own mailbox, too.

    mailbox: SLOTS x N rows of `slot` words. mailboxes: the address of each rank's mailbox. calls:
    the number of earlier calls, for each thread block. The flag is the number of the current call.
    """
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    flag = call.to(tl.int64) << 32
    at = block * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    inside = (rows < N)[:, None] & (at < count)[None, :]
    first = (call & 1).to(tl.int64) * N * slot  # word of this call's slot

    bits = tl.load(source + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
    words = flag | (bits.to(tl.int64) & 0xFFFFFFFF)
    # each rank begins with another mailbox
    theirs = tl.load(mailboxes + (rank + rows) % N).to(tl.pointer_type(tl.int64))
    tl.store(theirs[:, None] + first + rank * slot + at[None, :], words[None, :], mask=inside)

    mine = mailbox + first + rows[:, None] * slot + at[None, :]
    arrived = tl.load(mine, mask=inside, other=flag, volatile=True)
    while tl.max(((arrived >> 32) != call).to(tl.int32)) > 0:
        arrived = tl.load(mine, mask=inside, other=flag, volatile=True)
    addends = (arrived & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(result + at, tl.sum(addends, 0), mask=at < count)
    tl.store(calls + block, call)


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]
def flagged_kernel(  # type: ignore[no-untyped-def]
    source, result, mailbox, mailboxes, calls, count, slot, rank, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum a float32 buffer over all ranks, sending a flag after each block of elements.

    A rank's own elements stay in registers, and its own row of the mailbox stays empty.

    mailbox: SLOTS x N rows of `slot` elements, then N flags for each block. The other parameters
    are those of `words_kernel`.
    """
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    first = (call & 1).to(tl.int64) * N * slot  # element of this call's slot
    flags = 2 * N * slot.to(tl.int64) + block * N

    own = tl.load(source + at, mask=inside, other=0.0)
    for distance in tl.static_range(1, N):
        address = tl.load(mailboxes + (rank + distance) % N)
        theirs = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        tl.store(theirs + first + rank * slot + at, own, mask=inside)
    tl.debug_barrier()  # all threads have sent before the flag is set
    for distance in tl.static_range(1, N):
        theirs = tl.load(mailboxes + (rank + distance) % N).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + flags + rank, call, sem="release", scope="sys")

    mine = mailbox.to(tl.pointer_type(tl.int32)) + flags
    for distance in tl.static_range(1, N):
        while tl.atomic_add(mine + (rank + distance) % N, 0, sem="acquire", scope="sys") - call < 0:
            pass  # a rank that is a call ahead has also sent this call's elements
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.static_range(N):  # all ranks add up in the same order
        total += tl.load(mailbox + first + row * slot + at, mask=inside & (row != rank), other=own)
    tl.store(result + at, total, mask=inside)
    tl.store(calls + block, call)


def launch(
    source: Tensor, result: Tensor, mailbox: Tensor, mailboxes: Tensor, calls: Tensor, rank: int
) -> None:
    """Launch one of the two Triton kernels of the low-latency all-reduce.

    The mailbox's type decides which kernel. The parameters are those of the kernels.
    """
    N, blocks, words = mailboxes.numel(), calls.numel(), mailbox.dtype == torch.int64
    slot = blocks * (WORDS_BLOCK if words else FLAGGED_BLOCK)
    arguments = (source, result, mailbox, mailboxes, calls, source.numel(), slot, rank)
    if words:
        words_kernel[(blocks,)](*arguments, N=N, ROWS=triton.next_power_of_2(N), BLOCK=WORDS_BLOCK)
    else:
        flagged_kernel[(blocks,)](*arguments, N=N, BLOCK=FLAGGED_BLOCK, num_warps=FLAGGED_WARPS)


def mailbox_layout(count: int, N: int, *, words: bool) -> tuple[int, int, torch.dtype]:
    """Return the number of thread blocks, and the length and type of each rank's mailbox."""
    block = WORDS_BLOCK if words else FLAGGED_BLOCK
    blocks = triton.cdiv(count, block)
    size = SLOTS * N * blocks * block
    return (blocks, size, torch.int64) if words else (blocks, size + blocks * N, torch.float32)


class LowLatency:
    """A low-latency all-reduce, which writes the sum of `source` over all ranks to `result`.

    source, result: float32 [count] of at most LOW_LATENCY_BYTES, anywhere on the GPU. They may be
    the same tensor. All ranks of the default group create one object together and call `sum`
    equally often. The sums are bit-identical on all ranks.
    """

    def __init__(self, source: Tensor, result: Tensor) -> None:
        rank, device = dist.get_rank(), source.device
        words = source.numel() * FLOAT32_BYTES <= WORDS_BYTES
        blocks, size, dtype = mailbox_layout(source.numel(), dist.get_world_size(), words=words)
        mailbox = symmetric_buffer(size, dtype, device).zero_()
        mailboxes, self.handle = mapped_addresses(mailbox)
        calls = torch.zeros(blocks, dtype=torch.int32, device=device)
        self.arguments = source, result, mailbox, mailboxes, calls, rank
        torch.cuda.synchronize(device)
        self.handle.barrier()  # no rank writes into a mailbox that is yet to be cleared
        torch.cuda.synchronize(device)

    def sum(self) -> Tensor:
        """Launch the all-reduce on the current CUDA stream and return the result tensor."""
        launch(*self.arguments)
        return self.arguments[1]
