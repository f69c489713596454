"""The `measure` fixture's own refusals; what it measures is tested in runs of pytest."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from ddpperf.plugin.measure import Measure, VirtualClock
from ddpperf.specs import AllReduceSpec
from ddpperf.workers.pool import Pool

SPEC = AllReduceSpec(world_size=2, nbytes=1024)


def measure_with(error: Exception | None = None) -> Measure:
    def pool() -> Pool:
        assert error is not None, "no pool was to be asked for"
        raise error

    benchmark: Any = None
    return Measure(benchmark, pool, lambda _: [])


def test_a_machine_without_room_fails_the_test_with_the_systems_words() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/ddpperf-x")
    with pytest.raises(pytest.fail.Exception, match="No space left on device: '/tmp/ddpperf-x'") as refusal:
        measure_with(full)(SPEC)
    assert refusal.value.pytrace is False


def test_what_is_no_spec_is_refused_in_one_sentence() -> None:
    wrong: Any = "1KiB"
    with pytest.raises(pytest.fail.Exception, match=r"^measure takes a spec such as AllReduceSpec, got '1KiB'$"):
        measure_with()(wrong)


@pytest.mark.parametrize("by_set", [{"A1": float("nan")}, {"A1": float("inf")}, {}])
def test_a_metric_that_json_cannot_hold_fails_its_test_alone(by_set: dict[str, float]) -> None:
    with pytest.raises(pytest.fail.Exception, match="the metric speedup must have a finite number for each set"):
        measure_with().metric("speedup", "1", by_set)


def test_a_metric_is_the_median_over_sets() -> None:
    measure = measure_with()
    measure.metric("speedup", "1", {"A1": 1.0, "A2": 9.0, "A3": 2.0})
    assert measure.metrics["speedup"] == {"value": 2.0, "unit": "1", "by_set": {"A1": 1.0, "A2": 9.0, "A3": 2.0}}


@pytest.mark.parametrize("seconds", [1e-9, 0.1, 1 / 3, 12345.678])
def test_the_clock_gives_a_duration_back_to_the_last_bit(seconds: float) -> None:
    clock = VirtualClock()
    for _ in range(3):
        clock.rewind()
        start = clock()
        clock.advance(seconds)
        assert clock() - start == seconds
