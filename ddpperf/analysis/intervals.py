"""Unions and overlaps of time intervals in any unit, and the step parts that follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Split:
    """The durations of a rank's communication, computation, copies and idle time.

    Intervals of one kind are merged first. `all_reduces` is a part of `communication`. `exposed` is
    communication beside which nothing computes. `idle` is time without any of the three.
    """

    whole: float
    communication: float
    all_reduces: float
    exposed: float
    compute: float
    copies: float
    idle: float


def split(
    whole: Interval,
    communication: Iterable[Interval],
    compute: Iterable[Interval],
    copies: Iterable[Interval],
    all_reduces: Iterable[Interval] = (),
) -> Split:
    """Split a rank's time into communication, computation, copies and idle time.

    Intervals count as far as they lie within `whole`.
    """
    begin, end = whole
    sending, computing, copying, reducing = (
        [(max(start, begin), min(stop, end)) for start, stop in kind]
        for kind in (communication, compute, copies, all_reduces)
    )
    return Split(
        whole=end - begin,
        communication=length(sending),
        all_reduces=length(reducing),
        exposed=length(sending) - overlap(sending, computing),
        compute=length(computing),
        copies=length(copying),
        idle=end - begin - length([*sending, *computing, *copying]),
    )
