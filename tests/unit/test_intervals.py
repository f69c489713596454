"""Unions and overlaps of intervals, and a split that accounts for all of the time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.intervals import Interval, length, merged, overlap, split, without_waiting
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
        "exposed_comm_seconds": len(sending - computing),
        "compute_seconds": len(computing),
        "copy_seconds": len(copying),
        "idle_seconds": len(inside - sending - computing - copying),
    }


def test_the_rank_that_comes_last_to_a_message_does_not_wait() -> None:
    """Rank 0 is late for the second message, rank 1 for the first. Each alone sends for 11 or 12."""
    assert without_waiting([[(0, 10), (10, 11)], [(8, 10), (10, 20)]]) == 3
    with pytest.raises(ValueError, match="zip"):
        without_waiting([[(0, 10), (10, 11)], [(8, 10)]])


def test_messages_sent_together_count_once() -> None:
    together = [(0.0, 10.0), (0.0, 10.0)]
    assert without_waiting([together, together]) == 10
