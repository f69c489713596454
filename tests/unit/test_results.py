"""Samples: only durations are kept, a step is the slowest rank's, and JSON keeps every bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec, EpochSpec, Spec, TrainingSpec

SPEC = AllReduceSpec(world_size=2, nbytes=1024)
ALONE = TrainingSpec(world_size=1, per_rank_batch_size=32, strategy="single")
EPOCH = EpochSpec(world_size=1, per_rank_batch_size=32, strategy="single")


def sample(*seconds: tuple[float, ...], name: str = "A1") -> Sample:
    return Sample(set=name, side="A", torch="2.11", seconds=seconds)


def measured(*samples: Sample, spec: Spec = SPEC, iterations: int = 1) -> Measured:
    return Measured(spec=spec, iterations=iterations, samples=samples)


@pytest.mark.parametrize(
    ("spec", "bound"),
    [
        (SPEC, 3.0 / 1.0),  # the slower rank of the median round, by the slower device
        (ALONE, 2.0 / 0.5),  # the others' devices were not this one
        (dataclasses.replace(ALONE, delay_seconds=0.5), 2.0 / 1.0),
        (dataclasses.replace(EPOCH, per_rank_batch_size=2, epoch_images=6), 2.0 / 1.5),  # three steps
    ],
)
def test_launch_bound_is_step_over_device_time(spec: Spec, bound: float) -> None:
    counters: dict[str, tuple[float, ...]] = {"device_seconds": (0.5, 1.0)}
    seconds = (4.0, 6.0), (4.0, 2.0), (18.0, 10.0)
    one = dataclasses.replace(sample(*seconds), counters=counters)
    unknown = dataclasses.replace(sample(*seconds, name="A2"), counters={"device_seconds": (0.0, 0.0)})
    assert measured(one, unknown, sample((1.0, 1.0), name="A3"), spec=spec, iterations=2).launch_bound() == {
        "A1": pytest.approx(bound)
    }


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1e-3])
def test_what_is_no_duration_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=rf"set A1 measured {seconds} s, which is no duration"):
        sample((0.1, 0.1), (0.1, seconds))


@pytest.mark.parametrize("rounds", [(), ((),), ((0.1, 0.2), (0.1,)), ((0.1,), ())])
def test_a_round_without_every_rank_is_refused(rounds: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="set A1 must have at least one round, each with every rank"):
        sample(*rounds)


def test_mean_shows_the_stall_that_the_median_hides() -> None:
    """The slowest rank of each round counts, as in the median."""
    rounds = sample((1.0, 2.0), (2.0, 1.0), (2.0, 17.0)), sample((1.0, 3.0), name="A2")
    both = measured(*rounds, spec=AllReduceSpec(world_size=2, nbytes=1024), iterations=2)
    assert both.mean_step_seconds() == {"A1": 3.5, "A2": 1.5}
    assert both.median_step_seconds() == {"A1": 1.0, "A2": 1.5}


@pytest.mark.parametrize(("devices", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.5)])
def test_slowest_device_has_the_largest_median(devices: int, seconds: float) -> None:
    """The median of each round's maximum would be 4.0, because each device stalls in another round."""
    one = sample((2.0, 3.0, 5.0), (8.0, 3.0, 5.0), (2.0, 8.0, 5.0))
    other = sample((4.0, 4.0, 1.0), (2.0, 2.0, 1.0), name="A2")
    alone = measured(one, other, spec=ALONE, iterations=2)
    assert alone.slowest_device_seconds(devices) == {"A1": seconds, "A2": 1.5}


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        (AllReduceSpec(world_size=3, nbytes=1024), 2.0 + 8.0 + 4.0),  # of the slowest rank
        (ALONE, 1.0 + 2.0 + 0.5 + 8.0 + 4.0 + 0.25 + 4.0 + 1.0 + 1.0),  # one after the other
        (EPOCH, 1.0 + 8.0 + 4.0),  # the first alone
        (TrainingSpec(world_size=3, per_rank_batch_size=32, strategy="data_parallel"), 1.0 + 8.0 + 4.0),
    ],
)
def test_counted_seconds_add_ranks_in_turn(spec: Spec, seconds: float) -> None:
    both = measured(
        sample((1.0, 2.0, 0.5), (8.0, 4.0, 0.25)), sample((4.0, 1.0, 1.0), name="A2"), spec=spec, iterations=4
    )
    assert both.counted_seconds() == seconds


@pytest.mark.parametrize("values", [(), (None, 1.0), (math.nan, 1.0)])
def test_counter_needs_a_number_per_rank(values: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="each rank needs a finite number"):
        dataclasses.replace(sample((1.0, 1.0)), counters={"cpu_seconds": values})


def test_counter_is_a_maximum_in_each_set() -> None:
    one, other = sample((1.0, 1.0)), sample((1.0, 1.0), name="A2")
    one = dataclasses.replace(one, counters={"peak_memory_bytes": (3.0, 5.0)})
    assert measured(one, other).counter("peak_memory_bytes") == {"A1": 5.0}
    assert measured(one, other).counter("gradient_bytes") == {}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"samples": []}, "at least one set's sample"),
        ({"iterations": 0}, "iterations must be a whole number from 1 to 1000000000, got"),
    ],
)
def test_measurement_without_steps_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Measured.from_json(measured(sample((0.1, 0.2))).to_json() | change)
