"""Samples: only durations are kept, a step is the slowest rank's, and JSON keeps every bit."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given

from ddpperf.results import Measured, Sample
from ddpperf.specs import AllReduceSpec
from tests.strategies import BOUNDED, measurements

SPEC = AllReduceSpec(world_size=2, nbytes=1024)


def sample(*seconds: tuple[float, ...], name: str = "A1") -> Sample:
    return Sample(set=name, side="A", torch="2.11", seconds=seconds)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 0.0, -1e-3])
def test_what_is_no_duration_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=rf"set A1 measured {seconds} s, which is no duration"):
        sample((0.1, 0.1), (0.1, seconds))


@pytest.mark.parametrize("rounds", [(), ((),), ((0.1, 0.2), (0.1,)), ((0.1,), ())])
def test_a_round_without_every_rank_is_refused(rounds: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="set A1 must have at least one round, each with every rank"):
        sample(*rounds)


def test_a_step_is_the_slowest_ranks_share_of_a_round() -> None:
    measured = Measured(spec=SPEC, iterations=4, samples=(sample((1.0, 2.0, 8.0), (6.0, 4.0, 2.0)),))
    assert measured.step_seconds(measured.samples[0]) == [2.0, 1.5]
    assert measured.step_seconds(measured.samples[0], ranks=2) == [0.5, 1.5]
    assert measured.step_seconds(measured.samples[0], ranks=1) == [0.25, 1.5]


def test_steps_come_set_after_set() -> None:
    measured = Measured(spec=SPEC, iterations=1, samples=(sample((1.0,), (2.0,)), sample((3.0,), (4.0,), name="A2")))
    assert measured.all_step_seconds() == [1.0, 2.0, 3.0, 4.0]


@BOUNDED
@given(measurements())
def test_more_ranks_never_make_a_step_faster(measured: Measured) -> None:
    for each in measured.samples:
        ranks = range(1, len(each.seconds[0]) + 1)
        steps = [measured.step_seconds(each, ranks=count) for count in ranks]
        for few, many in itertools.pairwise(steps):
            assert all(fewer <= more for fewer, more in zip(few, many, strict=True))
        assert steps[-1] == measured.step_seconds(each)


@BOUNDED
@given(measurements())
def test_json_gives_the_same_seconds_back(measured: Measured) -> None:
    assert Measured.from_json(json.loads(json.dumps(measured.to_json(), allow_nan=False))) == measured


def stored(**change: Any) -> dict[str, Any]:
    return Measured(spec=SPEC, iterations=2, samples=(sample((0.1, 0.2)),)).to_json() | change


def stored_sample(**change: Any) -> dict[str, Any]:
    fields = {"set": "A1", "side": "A", "torch": "2.11", "seconds": [[0.1, 0.2]], "counters": {}}
    return stored(samples=[fields | change])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (stored(spec={"measurement": "broadcast"}), "broadcast"),
        (stored(spec=None), "NoneType"),
        (stored(samples=[{}]), "set"),
        (stored(samples=None), "NoneType"),
        ({}, "spec"),
        (stored_sample(seconds=[]), "at least one round"),
        (stored_sample(seconds=[[0.1], [0.1, 0.2]]), "each with every rank"),
        (stored_sample(seconds=[[math.nan, 0.2]]), "no duration"),
        (stored_sample(seconds=[["fast", 0.2]]), "could not convert"),
        (stored_sample(seconds=0.1), "float"),
    ],
)
def test_other_json_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError), match=sentence):
        Measured.from_json(fields)


@pytest.mark.parametrize("iterations", [0, -1, 2.5, True])
def test_rounds_of_no_whole_number_of_steps_are_refused(iterations: object) -> None:
    with pytest.raises((ValueError, TypeError), match="iterations"):
        Measured.from_json(stored(iterations=iterations))


def test_a_measurement_without_a_sample_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="sample"):
        Measured.from_json(stored(samples=[]))


def test_counters_that_are_no_mapping_are_refused() -> None:
    with pytest.raises((ValueError, KeyError, TypeError), match=r"counters|list"):
        Measured.from_json(stored_sample(counters=[1.0]))
