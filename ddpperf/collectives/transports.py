"""What an all_reduce is built on: tensors sent from rank to rank, by torch.distributed, or between threads of one process."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Route = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from
LOST_SECONDS = 20.0
UNREADABLE = 113  # in a tensor that is still to arrive; every type holds it


class Transport(Protocol):
    """One rank's view of all ranks. Between two ranks tensors arrive in the order in which they were sent."""

    rank: int
    world_size: int

    def start(self, sends: Sequence[Route], receives: Sequence[Route]) -> Callable[[], None]:
        """Begin all of these together. The result waits for them: until then nothing of them may be changed or read.

        Tensors are contiguous; those without an element are left out, on both sides.
        """


def exchange(transport: Transport, sends: Sequence[Route] = (), receives: Sequence[Route] = ()) -> None:
    transport.start(sends, receives)()


class GroupTransport:
    """Point-to-point operations of the default process group. On a GPU, waiting is the current stream's."""

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


class ThreadTransport:
    """A rank that is a thread, for tests: `run_in_threads` makes all of them. sent: how many messages and elements.

    What is under way is guarded: waiting raises RuntimeError for a tensor that was changed before it was sent, and one that
    is read before it has arrived holds nothing that could be meant.
    """

    def __init__(self, rank: int, world_size: int, boxes: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.sent: Counter[str] = Counter()
        self._boxes = boxes

    def start(self, sends: Sequence[Route], receives: Sequence[Route]) -> Callable[[], None]:
        under_way = [(tensor, rank, tensor.clone()) for tensor, rank in sends if tensor.numel()]
        for tensor, _ in receives:
            tensor.fill_(UNREADABLE)
        for _, rank, sent in under_way:
            self._boxes[self.rank, rank].put(sent)
            self.sent += Counter(messages=1, elements=sent.numel())

        def wait() -> None:
            for tensor, rank, sent in under_way:
                if not torch.equal(tensor, sent):
                    raise RuntimeError(
                        f"what rank {self.rank} sends to {rank} was changed before it was sent"
                    )
            for tensor, rank in receives:
                if tensor.numel():
                    tensor.copy_(self._boxes[rank, self.rank].get(timeout=LOST_SECONDS))

        return wait


def run_in_threads(world_size: int, work: Callable[[ThreadTransport], None]) -> list[ThreadTransport]:
    """Call `work` as every rank, each in a thread of its own; raises the first exception of any, and RuntimeError if something
    was sent that nobody took."""
    ranks = range(world_size)
    boxes: dict[tuple[int, int], queue.Queue[Tensor]] = {
        (one, other): queue.Queue() for one in ranks for other in ranks
    }
    transports = [ThreadTransport(rank, world_size, boxes) for rank in ranks]
    failures: list[BaseException] = []

    def run(transport: ThreadTransport) -> None:
        try:
            work(transport)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    if left := [route for route, box in boxes.items() if not box.empty()]:
        raise RuntimeError(f"something was sent from {left[0][0]} to {left[0][1]} that was not taken")
    return transports
