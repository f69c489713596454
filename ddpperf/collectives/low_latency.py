"""An all_reduce of ours for small buffers, in one Triton kernel: each rank writes its elements into all ranks' mapped memory,
and adds up what came in. No rank waits for a barrier; the price is that all of it goes to every rank.

Of the smallest four bytes travel with a flag of four in one word, as by NCCL's protocol LL: a GPU writes and reads it whole, so
that whoever sees the flag has the element. That is twice the bytes: of others a flag follows each block of elements, as by its
protocol Simple.

A block of threads sends all of its elements before it waits, and then only for the same block of the others: as long as GPUs
start blocks in order, it does not matter how many run at once. An H200 runs those of 4 MiB all at once, 512 of 256 threads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from ddpperf.collectives.symmetric_memory import group_name, symmetric_buffer
from ddpperf.specs import FLOAT32_BYTES

WORDS_BYTES = 2**18  # the most of a buffer that travels in words
WORDS_BLOCK, FLAGGED_BLOCK = 128, 2048  # elements that a block of threads sends, and adds up
FLAGGED_WARPS = 8  # of such a block
SLOTS = 2  # by the call's last bit, in both kernels: a rank is at most one ahead of another, for it needs what that sends


@triton.jit(do_not_specialize=["rank"])  # type: ignore[untyped-decorator]  # all ranks add up by the same instructions
def words_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
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
    """mailboxes: the addresses of all ranks' `mailbox`, SLOTS of N rows of `slot` words. calls: by block, those that were."""
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    flag = call.to(tl.int64) << 32
    at = block * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, ROWS)
    inside = (rows < N)[:, None] & (at < count)[None, :]
    first = (call & 1).to(tl.int64) * N * slot  # of this call's slot

    bits = tl.load(source + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
    words = flag | (bits.to(tl.int64) & 0xFFFFFFFF)
    theirs = tl.load(mailboxes + (rank + rows) % N).to(
        tl.pointer_type(tl.int64)
    )  # no two ranks begin with the same one
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
    """mailboxes: the addresses of all ranks' `mailbox`, SLOTS of N rows of `slot` elements, and for each block N flags. calls:
    by block, those that were."""
    block = tl.program_id(0)
    call = tl.load(calls + block) + 1
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    first = (call & 1).to(tl.int64) * N * slot  # of this call's slot
    flags = 2 * N * slot.to(tl.int64) + block * N

    own = tl.load(source + at, mask=inside, other=0.0)
    for distance in tl.static_range(N):
        theirs = tl.multiple_of(
            tl.load(mailboxes + (rank + distance) % N).to(tl.pointer_type(tl.float32)), 16
        )
        tl.store(theirs + first + rank * slot + at, own, mask=inside)
    tl.debug_barrier()  # all threads' elements before the flag
    for distance in tl.static_range(1, N):
        theirs = tl.load(mailboxes + (rank + distance) % N).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + flags + rank, call, sem="release", scope="sys")

    mine = mailbox.to(tl.pointer_type(tl.int32)) + flags
    for distance in tl.static_range(1, N):
        while tl.atomic_add(mine + (rank + distance) % N, 0, sem="acquire", scope="sys") - call < 0:
            pass  # a rank that is ahead has sent this call, too
    tl.debug_barrier()
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.static_range(N):  # all ranks add up in the same order
        total += tl.load(mailbox + first + row * slot + at, mask=inside, other=0.0)
    tl.store(result + at, total, mask=inside)
    tl.store(calls + block, call)


def launch(
    source: Tensor,
    result: Tensor,
    mailbox: Tensor,
    addresses: Tensor,
    calls: Tensor,
    *,
    slot: int,
    rank: int,
    N: int,
) -> None:
    """Call the kernel that the mailbox is for, of words or of elements; see its parameters."""
    grid, arguments = (
        (calls.numel(),),
        (source, result, mailbox, addresses, calls, source.numel(), slot, rank),
    )
    if mailbox.dtype == torch.int64:
        words_kernel[grid](*arguments, N=N, ROWS=triton.next_power_of_2(N), BLOCK=WORDS_BLOCK)
    else:
        flagged_kernel[grid](*arguments, N=N, BLOCK=FLAGGED_BLOCK, num_warps=FLAGGED_WARPS)


def mailbox_of(count: int, N: int, *, words: bool) -> tuple[int, int, int, torch.dtype]:
    """For `count` elements and N ranks: the blocks of threads, the elements of a slot's row, the mailbox' size and its type."""
    block = WORDS_BLOCK if words else FLAGGED_BLOCK
    blocks = triton.cdiv(count, block)
    slot = blocks * block
    return (
        blocks,
        slot,
        SLOTS * N * slot + (0 if words else blocks * N),
        torch.int64 if words else torch.float32,
    )


class LowLatency:
    """The sum of `source`, of float32 anywhere on the GPU, over all ranks in `result`, which may be the same.

    source, result: [count], of up to LOW_LATENCY_BYTES. All ranks of the default group make one together, and call `sum`
    equally often; it launches on the current stream. The sums are bit-identical on all of them.
    """

    def __init__(self, source: Tensor, result: Tensor) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.source, self.result = source, result
        self.rank, self.N = dist.get_rank(), dist.get_world_size()
        device = source.device
        words = source.numel() * FLOAT32_BYTES <= WORDS_BYTES
        blocks, self.slot, size, dtype = mailbox_of(source.numel(), self.N, words=words)
        self.mailbox = symmetric_buffer(size, dtype, device).zero_()
        self.handle: Any = symmetric_memory.rendezvous(self.mailbox, group_name())
        offset = self.mailbox.data_ptr() - self.handle.buffer_ptrs[self.rank]  # in what was allocated for it
        self.addresses = torch.tensor(
            [base + offset for base in self.handle.buffer_ptrs], dtype=torch.int64, device=device
        )
        self.calls = torch.zeros(blocks, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self.handle.barrier()  # no rank writes into what another has yet to clear
        torch.cuda.synchronize(device)

    def sum(self) -> Tensor:
        launch(
            self.source,
            self.result,
            self.mailbox,
            self.addresses,
            self.calls,
            slot=self.slot,
            rank=self.rank,
            N=self.N,
        )
        return self.result
