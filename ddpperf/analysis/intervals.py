"""Unions and overlaps of time intervals in any unit, and the step parts that follow from them."""

from __future__ import annotations

from collections.abc import Iterable

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


def split(
    whole: Interval,
    communication: Iterable[Interval],
    compute: Iterable[Interval],
    copies: Iterable[Interval],
    all_reduces: Iterable[Interval] = (),
) -> dict[str, float]:
    """Split a rank's time into communication, computation, copies and idle time, by counter.

    Intervals of one kind are merged first, and count as far as they lie within `whole`, which is
    traced_step_seconds. all_reduce_seconds are a part of comm_seconds. exposed_comm_seconds are
    communication while nothing computes. idle_seconds are time without any of the three.
    """
    begin, end = whole
    sending, computing, copying, reducing = (
        [(max(start, begin), min(stop, end)) for start, stop in kind]
        for kind in (communication, compute, copies, all_reduces)
    )
    return {
        "comm_seconds": length(sending),
        "all_reduce_seconds": length(reducing),
        "exposed_comm_seconds": length(sending) - overlap(sending, computing),
        "compute_seconds": length(computing),
        "copy_seconds": length(copying),
        "idle_seconds": end - begin - length([*sending, *computing, *copying]),
        "traced_step_seconds": end - begin,
    }
