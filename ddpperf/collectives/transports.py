"""Point-to-point messages between ranks, from which all-reduce algorithms are built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

Route = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from


class Transport(Protocol):
    """Interface for sending tensors from one rank to another and receiving them.

    Tensors from one rank to another arrive in the order in which they were sent.
    """

    rank: int
    world_size: int

    def start(self, sends: Sequence[Route], receives: Sequence[Route]) -> Callable[[], None]:
        """Start to send and receive tensors, and return a function that waits for the end.

        Until the wait is over, no tensor may be changed or read. Tensors are contiguous. The sender
        and the receiver skip a tensor without elements.
        """


def exchange(transport: Transport, sends: Sequence[Route] = (), receives: Sequence[Route] = ()) -> None:
    """Send and receive tensors, and wait until all transfers have finished."""
    transport.start(sends, receives)()


class GroupTransport:
    """Sends and receives tensors in torch's default process group.

    On a GPU, only the current stream waits.
    """

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
