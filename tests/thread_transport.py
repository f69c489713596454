"""Ranks that are threads of one process, and that check how an algorithm uses its messages."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddpperf.collectives.algorithms import ALGORITHMS, Route, Transport, hierarchical

LOST_SECONDS = 20.0
UNREADABLE = 113  # fills a tensor until its message arrives; every type holds it


class ThreadTransport(Transport):
    """A rank that is a thread; `run_in_threads` makes all of them. sent: numbers of messages and
    elements.

    events: each message as its receiver and its elements, and None for each end of a wait.
    Waiting raises RuntimeError if a tensor was changed before it was sent. A tensor that is read
    before its message arrives holds UNREADABLE.
    """

    def __init__(self, rank: int, world_size: int, boxes: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.sent: Counter[str] = Counter()
        self.events: list[tuple[int, int] | None] = []
        self._boxes = boxes

    def start(self, sends: Sequence[Route], receives: Sequence[Route]) -> Callable[[], None]:
        under_way = [(tensor, rank, tensor.clone()) for tensor, rank in sends if tensor.numel()]
        for tensor, _ in receives:
            tensor.fill_(UNREADABLE)
        for _, rank, sent in under_way:
            self._boxes[self.rank, rank].put(sent)
            self.sent += Counter(messages=1, elements=sent.numel())
            self.events.append((rank, sent.numel()))

        def wait() -> None:
            for tensor, rank, sent in under_way:
                if not torch.equal(tensor, sent):
                    raise RuntimeError(
                        f"the tensor from rank {self.rank} to {rank} was changed before it was sent"
                    )
            for tensor, rank in receives:
                if tensor.numel():
                    tensor.copy_(self._boxes[rank, self.rank].get(timeout=LOST_SECONDS))
            self.events.append(None)

        return wait


def run_in_threads(world_size: int, work: Callable[[ThreadTransport], None]) -> list[ThreadTransport]:
    """Call `work` for every rank in a thread.

    Raises the first exception of any rank, and RuntimeError if a message was sent and never
    received.
    """
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
        raise RuntimeError(f"a message from {left[0][0]} to {left[0][1]} was never received")
    return transports


def buffers_of(world_size: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a buffer of small whole numbers for each rank, which every type adds up exactly."""
    return [((torch.arange(count) * (rank + 2) + rank) % 5).to(dtype) for rank in range(world_size)]


def reduced(algorithm: str, buffers: list[Tensor]) -> list[ThreadTransport]:
    """Reduce in place, on as many ranks as there are buffers."""
    return run_in_threads(
        len(buffers), lambda transport: ALGORITHMS[algorithm](buffers[transport.rank], transport)
    )


def reduced_on_nodes(node_size: int, buffers: list[Tensor]) -> list[ThreadTransport]:
    """Reduce in place by the hierarchical algorithm, on as many ranks as there are buffers."""
    return run_in_threads(
        len(buffers),
        lambda transport: hierarchical(buffers[transport.rank], transport, node_size=node_size),
    )
