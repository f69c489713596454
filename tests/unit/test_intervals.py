"""Unions and overlaps of intervals, and a split that accounts for all of the time."""

from __future__ import annotations

from itertools import pairwise

import pytest
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
    assert found.whole == 20
    assert found.communication == len(units(talks) & inside)
    assert found.exposed == len((units(talks) & inside) - units(works))
    assert found.compute == len(units(works) & inside)
    assert found.copies == len(units(moves) & inside)
    assert found.idle == len(inside - units(talks) - units(works) - units(moves))


@pytest.mark.parametrize(
    ("talks", "works", "exposed"),
    [
        ([(0, 10)], [(2, 4), (3, 8)], 4),  # two kernels at the same time hide no more than one
        ([(0, 4), (2, 10)], [(0, 10)], 0),
        ([(0, 10), (0, 10)], [], 10),
        ([], [(0, 10)], 0),
    ],
)
def test_what_runs_twice_at_once_counts_once(
    talks: list[Interval], works: list[Interval], exposed: float
) -> None:
    assert split((0, 10), talks, works, []).exposed == exposed
