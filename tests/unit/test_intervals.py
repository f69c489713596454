"""Unions and overlaps of intervals, and a split that accounts for all of the time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.intervals import Interval, length, merged, overlap, split
from tests.generated import BOUNDED

# Whole numbers, so that each can be checked unit by unit.
intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair))), max_size=8
)


def units(given: list[Interval]) -> set[int]:
    return {unit for begin, end in given for unit in range(int(begin), int(end))}


@BOUNDED
@given(intervals, intervals)
def test_lengths_count_every_unit_once(first: list[Interval], second: list[Interval]) -> None:
    union = merged(first)
    assert units(union) == units(first)
    assert all(end < begin for (_, end), (begin, _) in pairwise(union)), "disjoint and in their order"
    assert length(first) == len(units(first))
    assert overlap(first, second) == overlap(second, first) == len(units(first) & units(second))


@BOUNDED
@given(intervals, intervals, intervals)
def test_a_split_is_that_of_its_units(
    talks: list[Interval], works: list[Interval], moves: list[Interval]
) -> None:
    found = split((5, 25), talks, works, moves)
    inside = set(range(5, 25))
    sending, computing, copying = (units(kind) & inside for kind in (talks, works, moves))
    assert found == {
        "traced_step_seconds": 20,
        "comm_seconds": len(sending),
        "all_reduce_seconds": 0,
        "exposed_comm_seconds": len(sending - computing),
        "compute_seconds": len(computing),
        "copy_seconds": len(copying),
        "idle_seconds": len(inside - sending - computing - copying),
    }
