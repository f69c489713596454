"""Memory that all GPUs of a node have mapped, and all_reduces in it, torch's and an own one: no library is called, ranks read
each other's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KERNEL_TYPES = (torch.float32, torch.bfloat16)  # that torch's kernels in mapped memory add up


def symmetric_buffer(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer of the default group, whose ranks call this together."""
    import torch.distributed._symmetric_memory as symmetric_memory  # only here: a build for the CPU may lack it

    buffer: Tensor = symmetric_memory.empty(count, dtype=dtype, device=device)
    # torch 2.11 clears the signals and copies the addresses beside the streams that use them: a signal could be lost, and an
    # address be what an earlier kernel still writes where it lies
    torch.cuda.synchronize(device)
    symmetric_memory.rendezvous(buffer, group_name())
    torch.cuda.synchronize(device)
    return buffer


def group_name() -> Any:  # a str that torch has a type of its own for
    group: Any = dist.group.WORLD
    return group.group_name


def one_shot(shared: Tensor) -> Tensor:
    """The sum, in other memory: each rank reads all of every rank's buffer."""
    summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group_name())
    return summed


def two_shot(shared: Tensor) -> Tensor:
    """The sum, in place: each rank adds up its share, and reads the others'."""
    summed: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group_name())
    return summed


class CopyEngines:
    """The sum of `buffer`, a symmetric_buffer, over all ranks, in its place, moved by the GPUs' copy engines.

    Each rank fetches its share of all others' buffers, adds it up, and fetches the other shares' sums. Multiprocessors are
    needed for the additions alone: what runs beside keeps them.
    """

    def __init__(self, buffer: Tensor) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.buffer = buffer
        self.handle: Any = symmetric_memory.rendezvous(buffer, group_name())
        rank, N = self.handle.rank, self.handle.world_size
        self.shares = buffer.tensor_split(N)
        self.own = self.shares[rank]
        self.others = [
            (rank + distance) % N for distance in range(1, N)
        ]  # no two ranks begin with the same one
        mapped = (self.handle.get_buffer(other, buffer.shape, buffer.dtype) for other in self.others)
        theirs = [each.tensor_split(N) for each in mapped]
        self.addends = [each[rank] for each in theirs]
        self.sums = [each[other] for other, each in zip(self.others, theirs, strict=True)]
        self.fetched = buffer.new_empty(N - 1, self.own.numel())

    def sum(self) -> Tensor:
        self.handle.barrier()  # all ranks have filled their buffers
        for fetched, addend in zip(self.fetched, self.addends, strict=True):
            fetched.copy_(addend)
        for fetched in self.fetched:
            self.own.add_(fetched)
        self.handle.barrier()  # all have added up their shares
        for other, other_sum in zip(self.others, self.sums, strict=True):
            self.shares[other].copy_(other_sum)
        self.handle.barrier()  # all have fetched the sums: buffers may be filled again
        return self.buffer
