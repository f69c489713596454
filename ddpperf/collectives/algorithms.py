"""All-reduce, by the algorithms of the literature: every rank's buffer becomes the sum over all ranks.

Of N ranks and S bytes a rank, a message costs a latency and its bytes over a link's bandwidth; `ddpperf.analysis.cost_models`
says what that makes. Each function takes a contiguous buffer of one dimension and changes it in place; the buffers of all ranks
are of one length and type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ddpperf.collectives.transports import Transport, exchange
from ddpperf.specs.collective import ring_pieces


def gather_broadcast(buffer: Tensor, transport: Transport) -> None:
    """Rank 0 takes all buffers, adds them up and sends the sum to everyone: what it must move grows with N."""
    others = range(1, transport.world_size)
    if transport.rank != 0:
        exchange(transport, sends=[(buffer, 0)])
        exchange(transport, receives=[(buffer, 0)])
        return
    gathered = [torch.empty_like(buffer) for _ in others]
    exchange(transport, receives=list(zip(gathered, others, strict=True)))
    for each in gathered:
        buffer.add_(each)
    exchange(transport, sends=[(buffer, rank) for rank in others])


def tree(buffer: Tensor, transport: Transport) -> None:
    """A binomial tree: pairs add up, then pairs of pairs, until rank 0 has the sum, which goes back the same way."""
    rank, distance = transport.rank, 1
    received = torch.empty_like(buffer)
    while distance < transport.world_size and not rank & distance:
        if rank + distance < transport.world_size:
            exchange(transport, receives=[(received, rank + distance)])
            buffer.add_(received)
        distance *= 2
    if rank:
        exchange(transport, sends=[(buffer, rank - distance)])
        exchange(transport, receives=[(buffer, rank - distance)])
    while (distance := distance // 2) > 0:
        if rank + distance < transport.world_size:
            exchange(transport, sends=[(buffer, rank + distance)])


def recursive_doubling(buffer: Tensor, transport: Transport) -> None:
    """Partners exchange whole buffers, at distance 1, 2, 4, ...: few messages, all of them long."""
    received = torch.empty_like(buffer)
    with power_of_two(buffer, transport) as ranks:
        distance = 1
        while distance < ranks:
            partner = transport.rank ^ distance
            exchange(transport, sends=[(buffer, partner)], receives=[(received, partner)])
            buffer.add_(received)
            distance *= 2


def halving_doubling(buffer: Tensor, transport: Transport) -> None:
    """Partners exchange halves of what they are still in charge of, at distance N/2, N/4, ..., until each has the sum of its
    own share; then these go back the way they came (Rabenseifner 2004)."""
    with power_of_two(buffer, transport) as ranks:
        kept, given_up = buffer, []
        distance = ranks // 2
        while distance > 0:
            partner = transport.rank ^ distance
            halves = kept.tensor_split(2)
            kept, given = halves if transport.rank < partner else reversed(halves)
            received = torch.empty_like(kept)
            exchange(transport, sends=[(given, partner)], receives=[(received, partner)])
            kept.add_(received)
            given_up.append((partner, kept, given))
            distance //= 2
        for partner, kept, given in reversed(given_up):
            exchange(transport, sends=[(kept, partner)], receives=[(given, partner)])


@contextmanager
def power_of_two(buffer: Tensor, transport: Transport) -> Iterator[int]:
    """The largest power of two of ranks, to which the others give their buffers before, and from which they have the sum after;
    0 for such a rank itself, which has nothing to do in between."""
    ranks = 2 ** (transport.world_size.bit_length() - 1)
    helped, helper = transport.rank - ranks, transport.rank + ranks
    if helped >= 0:
        exchange(transport, sends=[(buffer, helped)])
        yield 0
        exchange(transport, receives=[(buffer, helped)])
        return
    if helper < transport.world_size:
        received = torch.empty_like(buffer)
        exchange(transport, receives=[(received, helper)])
        buffer.add_(received)
    yield ranks
    if helper < transport.world_size:
        exchange(transport, sends=[(buffer, helper)])


def ring(buffer: Tensor, transport: Transport) -> None:
    """Every rank sends to its right neighbour and receives from its left one: the N segments of the buffer go around once to be
    added up, and once more to be told (Patarasuk and Yuan 2009). Each rank moves 2 (N-1)/N S bytes, whatever N is.

    A segment travels in pieces: while one is added up, others are under way.
    """
    rank, N = transport.rank, transport.world_size
    right, left = (rank + 1) % N, (rank - 1) % N
    lanes = ring_pieces(buffer.numel() * buffer.element_size(), N)
    segments = [segment.tensor_split(lanes) for segment in buffer.tensor_split(N)]
    received = [
        torch.empty_like(max((segment[lane] for segment in segments), key=Tensor.numel))
        for lane in range(lanes)
    ]
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
    "gather_broadcast": gather_broadcast,
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "tree": tree,
}


def all_reduce(buffer: Tensor, algorithm: str, transport: Transport, *, mean: bool = False) -> None:
    """Replace `buffer`, which is contiguous and of any shape, by the sum over all ranks, or their mean, whose sum must be a
    number of its type; raises ValueError for another buffer, or algorithm."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"an all_reduce is by {', '.join(ALGORITHMS)}, got {algorithm!r}; name one of them")
    if not buffer.is_contiguous():
        raise ValueError(
            f"an all_reduce works on a contiguous buffer, got strides {buffer.stride()}; pass buffer.contiguous()"
        )
    if mean and not buffer.is_floating_point():
        raise ValueError(f"a mean needs a floating point type, got {buffer.dtype}; sum it, or convert it")
    if transport.world_size > 1:
        ALGORITHMS[algorithm](buffer.view(-1), transport)
    if mean:
        buffer.div_(transport.world_size)
