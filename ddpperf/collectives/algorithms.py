"""All-reduce algorithms from the literature, built from point-to-point messages between ranks.

Each algorithm replaces the buffer of a rank by the sum of the buffers of all ranks. The buffer is
contiguous, has one dimension and is changed in place. The buffers of all ranks have the same length
and type. `ddpperf.analysis.cost_models` has the cost of each algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.specs.collective import ring_pieces

Route = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from
Steps = Iterator[None]  # a generator that pauses while a transfer is under way


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
    ranks = range(transport.world_size)
    pieces = ring_pieces(buffer.numel() * buffer.element_size(), len(ranks))
    in_turns(
        ring_all_reduce(segments, ranks, transport) for segments in in_pieces(buffer, len(ranks), pieces)
    )


def hierarchical(buffer: Tensor, transport: Transport, *, node_size: int) -> None:
    """Sum a buffer over all ranks, so that few bytes cross the slow links between nodes.

    A node holds `node_size` consecutive ranks and divides the buffer into as many segments. A ring
    inside each node adds the segments up, so that each rank has its node's sum of one segment.
    A ring of the ranks with the same segment, one rank per node, adds up the sums of all M nodes.
    A ring inside each node then passes the sums to all its ranks. A node sends 2 (M-1)/M of the
    buffer to other nodes. The buffer travels in pieces, so that the links between nodes carry some
    pieces while others are added up inside the nodes.
    """
    node, local_rank = divmod(transport.rank, node_size)
    inside = range(node * node_size, (node + 1) * node_size)
    between = range(local_rank, transport.world_size, node_size)
    pieces = ring_pieces(buffer.numel() * buffer.element_size(), node_size)

    def lane(segments: Sequence[Tensor]) -> Steps:
        yield from ring_reduce_scatter(segments, inside, transport)
        sums = segments[(local_rank + 1) % node_size].tensor_split(len(between))
        yield from ring_all_reduce(sums, between, transport)
        yield from ring_all_gather(segments, inside, transport)

    in_turns(map(lane, in_pieces(buffer, node_size, pieces)))


def ring_all_reduce(segments: Sequence[Tensor], ranks: Sequence[int], transport: Transport) -> Steps:
    """Sum segments over some ranks, one segment per rank, by passing them around a ring twice."""
    yield from ring_reduce_scatter(segments, ranks, transport)
    yield from ring_all_gather(segments, ranks, transport)


def ring_reduce_scatter(segments: Sequence[Tensor], ranks: Sequence[int], transport: Transport) -> Steps:
    """Pass segments around a ring of ranks once; position p in it gets the sum of segment p + 1."""
    N, position = len(ranks), ranks.index(transport.rank)
    right, left = ranks[(position + 1) % N], ranks[(position - 1) % N]
    received = torch.empty_like(max(segments, key=Tensor.numel))
    for hop in range(N - 1):
        sent, added = segments[(position - hop) % N], segments[(position - hop - 1) % N]
        arrived = received[: added.numel()]
        wait = transport.start([(sent, right)], [(arrived, left)])
        yield
        wait()
        added.add_(arrived)


def ring_all_gather(segments: Sequence[Tensor], ranks: Sequence[int], transport: Transport) -> Steps:
    """Pass segments around a ring of ranks once; position p in it starts with segment p + 1."""
    N, position = len(ranks), ranks.index(transport.rank)
    right, left = ranks[(position + 1) % N], ranks[(position - 1) % N]
    for hop in range(N - 1):
        sent, replaced = segments[(position + 1 - hop) % N], segments[(position - hop) % N]
        wait = transport.start([(sent, right)], [(replaced, left)])
        yield
        wait()


def in_pieces(buffer: Tensor, segments: int, pieces: int) -> Iterator[list[Tensor]]:
    """Divide a buffer into segments and each segment into pieces; yield a piece of every segment."""
    divided = [segment.tensor_split(pieces) for segment in buffer.tensor_split(segments)]
    yield from map(list, zip(*divided, strict=True))


def in_turns(lanes: Iterable[Steps]) -> None:
    """Advance all lanes in turn: the first step of every lane, then the second step of every lane, ...

    A lane pauses after each start of a transfer, so that the transfers of all lanes overlap. All
    lanes have the same number of steps.
    """
    for _ in zip(*lanes, strict=True):
        pass


ALGORITHMS: dict[str, Callable[[Tensor, Transport], None]] = {
    function.__name__: function
    for function in (gather_broadcast, ring, recursive_doubling, halving_doubling, tree)
}
