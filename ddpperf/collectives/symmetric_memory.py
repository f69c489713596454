"""All-reduces in symmetric memory: the GPUs of a node access each other's buffers directly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KERNEL_TYPES = (torch.float32, torch.bfloat16)  # that torch's kernels in mapped memory can add


def symmetric_buffer(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate, together with all ranks, a buffer that the GPUs of all ranks can access."""
    import torch.distributed._symmetric_memory as symmetric_memory  # a torch for the CPU may lack it

    buffer: Tensor = symmetric_memory.empty(count, dtype=dtype, device=device)
    # torch 2.11 clears signals and copies addresses on other streams than those that use them.
    # Without these synchronizations a signal could be lost, and an earlier kernel could overwrite
    # an address.
    torch.cuda.synchronize(device)
    symmetric_memory.rendezvous(buffer, group_name())
    torch.cuda.synchronize(device)
    return buffer


def group_name() -> Any:
    """Return the name of torch's default process group."""
    group: Any = dist.group.WORLD
    return group.group_name


def one_shot(shared: Tensor) -> Tensor:
    """Return the sum of a shared buffer in a new tensor. Each rank reads all ranks' whole buffers."""
    summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group_name())
    return summed


def two_shot(shared: Tensor) -> Tensor:
    """Sum a shared buffer over all ranks in place and return the buffer.

    Each rank adds up one part of the buffer, then reads the other parts.
    """
    summed: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group_name())
    return summed


class CopyEngines:
    """An in-place all-reduce of a symmetric buffer, which the GPUs' copy engines move.

    Each rank copies one part of all other buffers, adds it up, and then copies the sums of the
    other parts. Only the additions need multiprocessors, so that concurrent kernels keep nearly all
    of them.
    """

    def __init__(self, buffer: Tensor) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.buffer = buffer
        self.handle: Any = symmetric_memory.rendezvous(buffer, group_name())
        rank, N = self.handle.rank, self.handle.world_size
        self.parts = buffer.tensor_split(N)
        self.own = self.parts[rank]
        self.others = [(rank + distance) % N for distance in range(1, N)]  # each rank begins with another
        buffers = [self.handle.get_buffer(other, buffer.shape, buffer.dtype) for other in self.others]
        mapped = [other.tensor_split(N) for other in buffers]
        self.addends = [parts[rank] for parts in mapped]
        self.sums = [parts[other] for other, parts in zip(self.others, mapped, strict=True)]
        self.copies = buffer.new_empty(N - 1, self.own.numel())

    def sum(self) -> Tensor:
        """Sum the symmetric buffer over all ranks in place and return the buffer."""
        self.handle.barrier()  # all ranks have filled their buffers
        for copy, addend in zip(self.copies, self.addends, strict=True):
            copy.copy_(addend)
        for copy in self.copies:
            self.own.add_(copy)
        self.handle.barrier()  # all ranks have added up their parts
        for other, other_sum in zip(self.others, self.sums, strict=True):
            self.parts[other].copy_(other_sum)
        self.handle.barrier()  # all ranks have copied the sums: buffers may be filled again
        return self.buffer
