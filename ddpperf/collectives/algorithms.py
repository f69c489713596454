"""All-reduce algorithms from the literature, built from point-to-point messages between ranks.

Each algorithm replaces the buffer of a rank by the sum of the buffers of all ranks. The buffer is
contiguous, has one dimension and is changed in place. The buffers of all ranks have the same length
and type. `ddpperf.analysis.cost_models` has the cost of each algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.specs.collective import ring_pieces

Route = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from


class Transport:
    """Sends tensors to and receives tensors from the ranks of torch's default process group.

    Tensors from one rank to another arrive in the order in which they were sent.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def start(self, sends: Sequence[Route], receives: Sequence[Route]) -> Callable[[], None]:
        """Start to send and receive tensors, and return a function that waits for the end.

        Until the wait is over, no tensor may be changed or read. On a GPU, only the current stream
        waits. Tensors are contiguous. The sender and the receiver skip a tensor without elements.
        """
        operations = [dist.P2POp(dist.isend, tensor, rank) for tensor, rank in sends if tensor.numel()]
        operations += [dist.P2POp(dist.irecv, tensor, rank) for tensor, rank in receives if tensor.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def exchange(self, sends: Sequence[Route] = (), receives: Sequence[Route] = ()) -> None:
        """Send and receive tensors, and wait until all transfers have finished."""
        self.start(sends, receives)()


def gather_broadcast(buffer: Tensor, transport: Transport) -> None:
    """Sum a buffer over all ranks by gathering all buffers on rank 0, which broadcasts the sum."""
    if transport.rank != 0:
        transport.exchange(sends=[(buffer, 0)])
        transport.exchange(receives=[(buffer, 0)])
        return
    gathered = [(torch.empty_like(buffer), rank) for rank in range(1, transport.world_size)]
    transport.exchange(receives=gathered)
    for other, _ in gathered:
        buffer.add_(other)
    transport.exchange(sends=[(buffer, rank) for _, rank in gathered])


def tree(buffer: Tensor, transport: Transport) -> None:
    """Sum a buffer over all ranks along a binomial tree. Rank 0 gets the sum and sends it back."""
    rank, distance = transport.rank, 1
    received = torch.empty_like(buffer)
    while distance < transport.world_size and not rank & distance:
        if rank + distance < transport.world_size:
            transport.exchange(receives=[(received, rank + distance)])
            buffer.add_(received)
        distance *= 2
    if rank:
        transport.exchange(sends=[(buffer, rank - distance)])
        transport.exchange(receives=[(buffer, rank - distance)])
    while (distance := distance // 2) > 0:
        if rank + distance < transport.world_size:
            transport.exchange(sends=[(buffer, rank + distance)])


def recursive_doubling(buffer: Tensor, transport: Transport) -> None:
    """Sum a buffer over all ranks by exchanging whole buffers at distance 1, 2, 4 and so on."""
    received = torch.empty_like(buffer)
    with power_of_two(buffer, transport) as ranks:
        distance = 1
        while distance < ranks:
            partner = transport.rank ^ distance
            transport.exchange(sends=[(buffer, partner)], receives=[(received, partner)])
            buffer.add_(received)
            distance *= 2


def halving_doubling(buffer: Tensor, transport: Transport) -> None:
    """Sum a buffer over all ranks by recursive halving and doubling (Rabenseifner 2004).

    In the first phase, ranks at distance N/2, N/4, ..., 1 exchange half of what they kept before
    and add up what they receive. Each rank then has the sum of one part of the buffer. In the
    second phase the same partners exchange their sums in the reverse order.
    """
    with power_of_two(buffer, transport) as ranks:
        kept, given_up = buffer, []
        distance = ranks // 2
        while distance > 0:
            partner = transport.rank ^ distance
            halves = kept.tensor_split(2)
            kept, given = halves if transport.rank < partner else reversed(halves)
            received = torch.empty_like(kept)
            transport.exchange(sends=[(given, partner)], receives=[(received, partner)])
            kept.add_(received)
            given_up.append((partner, kept, given))
            distance //= 2
        for partner, kept, given in reversed(given_up):
            transport.exchange(sends=[(kept, partner)], receives=[(given, partner)])


@contextmanager
def power_of_two(buffer: Tensor, transport: Transport) -> Iterator[int]:
    """Restrict an all-reduce to a power-of-two number of ranks, and yield this number.

    Before the all-reduce, each left-over rank sends its buffer to a rank that takes part, which
    adds it up. After the all-reduce, the left-over rank receives the sum. It gets 0 as the number.
    """
    ranks = 2 ** (transport.world_size.bit_length() - 1)
    helped, helper = transport.rank - ranks, transport.rank + ranks
    if helped >= 0:
        transport.exchange(sends=[(buffer, helped)])
        yield 0
        transport.exchange(receives=[(buffer, helped)])
        return
    if helper < transport.world_size:
        received = torch.empty_like(buffer)
        transport.exchange(receives=[(received, helper)])
        buffer.add_(received)
    yield ranks
    if helper < transport.world_size:
        transport.exchange(sends=[(buffer, helper)])


def ring(buffer: Tensor, transport: Transport) -> None:
    """Sum a buffer over all N ranks by passing segments around a ring (Patarasuk and Yuan 2009).

    The buffer's N segments go around twice. In the first round they are added up, in the second
    round the sums reach all ranks. Each rank sends 2 (N-1)/N of its buffer to its right neighbour.
    A segment travels in pieces, so that some pieces are sent while another is added up.
    """
    rank, N = transport.rank, transport.world_size
    right, left = (rank + 1) % N, (rank - 1) % N
    lanes = ring_pieces(buffer.numel() * buffer.element_size(), N)
    segments = [segment.tensor_split(lanes) for segment in buffer.tensor_split(N)]
    received = [torch.empty_like(max(pieces, key=Tensor.numel)) for pieces in zip(*segments, strict=True)]
    under_way: list[Callable[[], None]] = [lambda: None] * lanes
    for hop in range(2 * (N - 1) + 1):
        for lane in range(lanes):
            under_way[lane]()
            arrived = segments[(rank - hop) % N][lane]
            if 0 < hop < N:
                arrived.add_(received[lane][: arrived.numel()])
            if hop < 2 * (N - 1):
                following = segments[(rank - hop - 1) % N][lane]
                into = received[lane][: following.numel()] if hop < N - 1 else following
                under_way[lane] = transport.start([(arrived, right)], [(into, left)])


ALGORITHMS: dict[str, Callable[[Tensor, Transport], None]] = {
    function.__name__: function
    for function in (gather_broadcast, ring, recursive_doubling, halving_doubling, tree)
}
