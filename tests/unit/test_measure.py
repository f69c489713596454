"""The `measure` fixture: what it refuses, what it keeps of a test, and which warnings it adds."""

from __future__ import annotations

import dataclasses
import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from ddpperf.machine import hardware
from ddpperf.plugin.device_guard import Devices
from ddpperf.plugin.measure_fixture import Measure, Measuring, clock_of
from ddpperf.results.outcomes import warning
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec, EpochSpec, Spec, TrainingSpec
from tests.canned import CannedSuite, pool_of
from tests.fake_measure import measuring

REFUSALS = """
import pytest
from ddpperf.specs import AllReduceSpec
from tests.faults import failing

SPEC = AllReduceSpec(world_size=2, nbytes=1024)
OTHER = AllReduceSpec(world_size=2, nbytes=2048)

def test_warned(measure):
    measure(SPEC)
    measure.reference("other", OTHER)
    measure.warn("the moon is full")

def test_again(measure):
    measure(OTHER)

def test_two_of_its_own(measure):
    measure(SPEC)
    measure(OTHER)

def test_references_of_two_sets(measure):
    measure(SPEC)
    with pytest.raises(pytest.fail.Exception, match="rank 1 of set A1 was killed by SIGKILL"):
        measure.reference("dying", failing("kill"))
    measure.reference("other", OTHER)

def test_word(measure):
    measure("1KiB")
"""
SPEC = AllReduceSpec(world_size=2, nbytes=1024)
STEP = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
NO_BENCHMARK: Any = None


def measured(*sets: str, spec: Spec = STEP, **fields: Any) -> Measured:
    samples = [Sample(set=name, side=name[0], torch="2", seconds=((1.0, 1.0),), **fields) for name in sets]
    return Measured(spec=spec, iterations=1, samples=tuple(samples))


def measure_with(found: Exception | Measured) -> Measure:
    """Return a fixture whose pool raises an error, or returns a measurement."""

    def measure_once(*_: object) -> Measured:
        if isinstance(found, Exception):
            raise found
        return found

    pool = SimpleNamespace(counted_seconds=0.0, measure_once=measure_once)
    return Measure(NO_BENCHMARK, measuring(pool=pool))


@pytest.mark.usefixtures("canned")
def test_attempt_is_counted_and_has_fresh_warnings() -> None:
    with pool_of(2, rounds=1) as pool:
        warned = measuring(pool=pool)
        warned.notes = lambda measured, fresh: [warning(measured.spec.id)] * fresh
        measure = Measure(NO_BENCHMARK, warned)
        assert not isinstance(measure.attempt(SPEC), str)
        assert measure.notes == [warning(SPEC.id)]
        assert measure.counted_seconds == pool.counted_seconds > 0


def test_full_disk_fails_the_test() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/ddpperf-x")
    with pytest.raises(pytest.fail.Exception, match="No space left on device: '/tmp/ddpperf-x'"):
        measure_with(full)(SPEC)


@pytest.mark.parametrize("by_set", [{"A1": float("nan")}, {"A1": float("inf")}, {}])
def test_infinite_metric_fails_its_test(by_set: dict[str, float]) -> None:
    with pytest.raises(pytest.fail.Exception, match="speedup must have a finite number for each set"):
        measure_with(measured("A1")).metric("speedup", by_set)


def test_value_of_a_metric_is_the_median_over_one_side() -> None:
    measure = measure_with(measured("A1", "A2", "B3"))
    by_set = {"A1": 1.0, "A2": 3.0, "B3": 10.0}
    measure.metric("speedup", by_set)
    assert measure.metrics["speedup"] == {"value": 3.0, "unit": "1", "by_set": by_set}, "nothing measured yet"
    measure.measured = measured("A1", "A2", "B3")
    measure.metric("speedup", by_set)
    assert measure.metrics["speedup"]["value"] == 2.0
    assert measure.values_of("B") == {"speedup": 10.0}
    measure.metric("efficiency", {"B3": 0.5})
    assert measure.metrics["efficiency"]["value"] == 0.5, "of all sets, if the side has none"


def test_spec_of_replaced_sets_is_not_recorded() -> None:
    """The reference was measured by set A1, which failed before the test's own spec was measured."""
    measure = measure_with(measured("A2"))
    measure.references["other"] = measured("A1")
    with pytest.raises(pytest.fail.Exception, match="replaced between the reference other and the test's"):
        measure(SPEC)
    assert measure.measured is None


@pytest.mark.parametrize("seconds", [1e-9, 1 / 3, 12345.678])
def test_clock_returns_exact_durations(seconds: float) -> None:
    clock = clock_of([seconds] * 3)
    for _ in range(3):
        start = clock()
        assert clock() - start == seconds


def test_wrong_use_of_measure_fails_the_test(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(REFUSALS)
    run = canned_suite.run()
    for test, why in (
        ("test_two_of_its_own", "a test measures one spec as its own, this is its second"),
        ("test_references_of_two_sets", "a process set was replaced between the reference other and the"),
        ("test_word", "measure takes a spec such as AllReduceSpec, got '1KiB'"),
    ):
        run.assert_one_sentence(1, f"{test} failed: {why}")
    run.assert_one_sentence(1, "!1 the moon is full")
    stored = canned_suite.measured()
    warned = {"kind": "warning", "text": "the moon is full"}
    assert [each["notes"] for each in stored.values()] == [[warned], [], [], []]
    other = stored["test_warned"]["references"]["other"]
    assert stored["test_again"]["samples"] == other["samples"], "measured once, as the reference"
    replaced = stored["test_references_of_two_sets"]
    assert list(replaced["references"]) == [], "a refused reference is not kept"
    assert replaced["samples"] == stored["test_warned"]["samples"], "before the set was replaced"


# --- warnings, which every test has that uses a measurement


def test_all_tests_of_a_measurement_get_its_warnings() -> None:
    reports = [[warning("GPU 0 was throttled")], [], []]  # once, as the driver does
    devices: Any = Devices([], 1)
    devices._watch = SimpleNamespace(warnings=lambda: reports.pop(0))
    first = Measuring(NO_BENCHMARK, devices, hardware.Machine())
    assert first.notes(measured("A1"), True) == [warning("GPU 0 was throttled")]
    assert first.notes(measured("A1"), False) == [warning("GPU 0 was throttled")]
    assert first.notes(measured("A2"), True) == [], "another set measured it undisturbed"
    cores = hardware.core_count()
    epoch = EpochSpec(**{**dataclasses.asdict(STEP), "input": "dataloader", "loader_workers": cores})
    crowded = [warning(f"{cores + 1} processes share {cores} cores")]
    assert first.notes(measured("A1", spec=epoch), True) == crowded


def test_sets_that_ran_other_kernels_are_warned_about() -> None:
    samples = [*measured("A1", "A2", kernels="x").samples, *measured("A3", kernels="y").samples]
    different = Measured(spec=STEP, iterations=1, samples=tuple(samples))
    found = Measuring(NO_BENCHMARK, Devices([], 1), hardware.Machine()).notes(different, True)
    assert found == [warning("process sets ran different kernels: A1, A2; A3")]
