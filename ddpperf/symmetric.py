"""Memory that all GPUs of a node have mapped, and torch's all_reduces in it: no library is called, ranks read each other's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def symmetric_buffer(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer of the default group, whose ranks call this together."""
    import torch.distributed._symmetric_memory as symmetric_memory  # only here: a build for the CPU may lack it

    buffer: Tensor = symmetric_memory.empty(count, dtype=dtype, device=device)
    symmetric_memory.rendezvous(buffer, group_name())
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
