"""Point-to-point messages between ranks, which the all-reduce algorithms are built on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Route = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from


class Transport(Protocol):
    """One rank's connections to all others, each of which keeps the order of its tensors."""

    rank: int
    world_size: int

    def start(self, sends: Sequence[Route], receives: Sequence[Route]) -> Callable[[], None]:
        """Start all sends and receives together and return a function that waits for them.

        Until the wait is over, no tensor may be changed or read. Tensors are contiguous. A tensor
        without elements is skipped, on both sides.
        """


def exchange(transport: Transport, sends: Sequence[Route] = (), receives: Sequence[Route] = ()) -> None:
    """Send and receive, and wait for the end."""
    transport.start(sends, receives)()


class GroupTransport:
    """Messages of the default process group. On a GPU, only the current stream waits."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def start(self, sends: Sequence[Route], receives: Sequence[Route]) -> Callable[[], None]:
        operations = [dist.P2POp(dist.isend, tensor, rank) for tensor, rank in sends if tensor.numel()]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for tensor, rank in receives if tensor.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait
