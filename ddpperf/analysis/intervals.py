"""Intervals of time, and what a step's time is spent on by them. Standard library only; any unit, the same for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in their order; those without a length are left out."""
    union: list[Interval] = []
    for begin, end in sorted(each for each in intervals if each[1] > each[0]):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((begin, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    """Of the union."""
    return sum(end - begin for begin, end in merged(intervals))


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """How long both last at the same time."""
    one, other = merged(first), merged(second)
    return length(one) + length(other) - length([*one, *other])


@dataclass(frozen=True, kw_only=True)
class Split:
    """A rank's time: what of it is any communication, which of that is all_reduces, and which exposed, for nothing computes
    beside it, what computes, what copies, and what is idle, for nothing of these runs. Each is merged first.
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
    """What `whole` is spent on; what of the intervals lies outside of it does not count. all_reduces: of the communication."""
    kinds = (communication, compute, copies, all_reduces)
    talks, works, moves, sums = ([_within(each, whole) for each in kind] for kind in kinds)
    return Split(
        whole=whole[1] - whole[0],
        communication=length(talks),
        all_reduces=length(sums),
        exposed=length(talks) - overlap(talks, works),
        compute=length(works),
        copies=length(moves),
        idle=whole[1] - whole[0] - length([*talks, *works, *moves]),
    )


def _within(interval: Interval, whole: Interval) -> Interval:
    return max(interval[0], whole[0]), min(interval[1], whole[1])
