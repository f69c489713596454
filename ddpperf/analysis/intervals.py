"""Unions and overlaps of time intervals in any unit, and the step parts that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals in order, without empty ones."""
    union: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[1] > each[0]):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((begin, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the union of intervals."""
    return sum(end - begin for begin, end in merged(intervals))


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return the total length of the intersection of two groups of intervals."""
    one, other = merged(first), merged(second)
    return length(one) + length(other) - length([*one, *other])


def without_waiting(messages: Sequence[Sequence[Interval]]) -> float:
    """Return how long ranks send messages, without the time in which they wait for each other.

    messages[rank] are a rank's messages in their order. Of each message, the time of the rank that comes
    last counts, which is the shortest. Messages that are sent at the same time count once.
    Raises ValueError if ranks have different numbers of messages.
    """
    shortest = (min(end - begin for begin, end in ranks) for ranks in zip(*messages, strict=True))
    return min(math.fsum(shortest), *map(length, messages))


def split(
    whole: Interval,
    communication: Iterable[Interval],
    compute: Iterable[Interval],
    copies: Iterable[Interval],
) -> dict[str, float]:
    """Split a rank's time into communication, computation, copies and idle time, by counter.

    Intervals of one kind are merged first, and count as far as they lie within `whole`, which is
    traced_step_seconds. exposed_comm_seconds are communication while nothing computes. idle_seconds
    are time without any of the three.
    """
    begin, end = whole
    sending, computing, copying = (
        [(max(start, begin), min(stop, end)) for start, stop in kind]
        for kind in (communication, compute, copies)
    )
    return {
        "comm_seconds": length(sending),
        "exposed_comm_seconds": length(sending) - overlap(sending, computing),
        "compute_seconds": length(computing),
        "copy_seconds": length(copying),
        "idle_seconds": end - begin - length([*sending, *computing, *copying]),
        "traced_step_seconds": end - begin,
    }
