"""The `measure` fixture: what it refuses, and what it keeps of a test."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from ddpperf.plugin.measure_fixture import Measure, VirtualClock
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.results.outcomes import OutcomeKind
from ddpperf.results.record import Record
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import Side
from tests.canned import CannedSuite

REFUSALS = """
import dataclasses
import pytest
from ddpperf.specs import AllReduceSpec, Fault

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
        measure.reference("dying", dataclasses.replace(OTHER, fault=Fault(kind="kill", rank=1)))
    measure.reference("other", OTHER)
"""

SPEC = AllReduceSpec(world_size=2, nbytes=1024)


def failing_pool(error: Exception | None) -> Any:
    """Return a pool that fails at the first measurement."""

    def measure_once(*_: object) -> None:
        assert error is not None, "nothing was to be measured"
        raise error

    return SimpleNamespace(counted_seconds=0.0, measure_once=measure_once)


def measure_with(error: Exception | None = None) -> Measure:
    benchmark: Any = None
    return Measure(benchmark, failing_pool(error), lambda measured, fresh: [])


def test_full_disk_fails_the_test() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/ddpperf-x")
    with pytest.raises(pytest.fail.Exception, match="No space left on device: '/tmp/ddpperf-x'") as refusal:
        measure_with(full)(SPEC)
    assert refusal.value.pytrace is False


def test_other_values_than_specs_are_refused() -> None:
    wrong: Any = "1KiB"
    with pytest.raises(
        pytest.fail.Exception, match=r"^measure takes a spec such as AllReduceSpec, got '1KiB'$"
    ):
        measure_with()(wrong)


@pytest.mark.parametrize("by_set", [{"A1": float("nan")}, {"A1": float("inf")}, {}])
def test_infinite_metric_fails_its_test(by_set: dict[str, float]) -> None:
    with pytest.raises(
        pytest.fail.Exception, match="the metric speedup must have a finite number for each set"
    ):
        measure_with().metric("speedup", by_set)


def test_metric_is_the_median_over_sets() -> None:
    measure = measure_with()
    measure.metric("speedup", {"A1": 1.0, "A2": 9.0, "A3": 2.0})
    assert measure.metrics["speedup"] == {
        "value": 2.0,
        "unit": "1",
        "by_set": {"A1": 1.0, "A2": 9.0, "A3": 2.0},
    }


def test_value_of_a_metric_is_that_of_one_side() -> None:
    record = Record()
    record.measured = Measured(
        spec=SPEC,
        iterations=1,
        samples=tuple(
            Sample(set=name, side=name[0], torch="2", seconds=((1.0, 1.0),)) for name in ("A1", "A2", "B3")
        ),
    )
    record.add_metric("speedup", "1", {"A1": 1.0, "A2": 3.0, "B3": 10.0}, "A")
    record.add_metric("efficiency", "1", {"A1": 0.5, "A2": 0.5}, "B")
    assert record.metrics["speedup"]["value"] == 2.0
    assert record.metrics["efficiency"]["value"] == 0.5, "of all sets, if the side has none"
    assert record.values_of("B") == {"speedup": 10.0}
    assert record.values_of("A") == {"speedup": 2.0, "efficiency": 0.5}


def test_spec_of_replaced_sets_is_not_recorded() -> None:
    """The reference was measured by set A1, which failed before the test's own spec was measured."""
    own, reference = (
        Measured(
            spec=SPEC, iterations=1, samples=(Sample(set=name, side="A", torch="2", seconds=((1.0, 1.0),)),)
        )
        for name in ("A2", "A1")
    )
    unused: Any = None
    pool: Any = SimpleNamespace(counted_seconds=0.0, measure_once=lambda *_: own)
    measure = Measure(unused, pool, lambda measured, fresh: [])
    measure.record.references["other"] = reference
    with pytest.raises(pytest.fail.Exception, match="replaced between the reference other and the test's"):
        measure(SPEC)
    assert measure.record.measured is None
    assert measure.stats() is None


@pytest.mark.parametrize("seconds", [1e-9, 0.1, 1 / 3, 12345.678])
def test_clock_returns_exact_durations(seconds: float) -> None:
    clock = VirtualClock()
    for _ in range(3):
        clock.show()
        start = clock()
        clock.show(seconds)
        assert clock() - start == seconds


def test_wrong_use_of_measure_fails_the_test(canned_suite: CannedSuite) -> None:
    canned_suite.experiment.write_text(REFUSALS)
    run = canned_suite.run()
    run.assert_one_sentence(
        1, "test_two_of_its_own failed: a test measures one spec as its own, this is its second"
    )
    run.assert_one_sentence(
        1,
        "test_references_of_two_sets failed: a process set was replaced between the reference other and "
        "the test",
    )
    run.assert_one_sentence(1, "!1 the moon is full")
    header, stored = canned_suite.saved_runs()[-1]["ddpperf"], canned_suite.measured()
    outcomes = {test.rpartition("::")[2]: outcome["kind"] for test, outcome in header["outcomes"].items()}
    assert outcomes == {
        "test_warned": "passed",
        "test_again": "passed",
        "test_two_of_its_own": "failed",
        "test_references_of_two_sets": "failed",
    }
    assert {test: each["notes"] for test, each in stored.items()} == {
        "test_warned": [{"kind": "warning", "text": "the moon is full"}],
        "test_again": [],
        "test_two_of_its_own": [],
        "test_references_of_two_sets": [],
    }
    assert list(stored["test_warned"]["references"]) == ["other"]
    assert stored["test_again"]["samples"] == stored["test_warned"]["references"]["other"]["samples"], (
        "measured once, as the leg"
    )
    assert list(stored["test_references_of_two_sets"]["references"]) == [], (
        "whatever a refused leg gave is not kept"
    )
    assert stored["test_references_of_two_sets"]["samples"] == stored["test_warned"]["samples"], (
        "before the set was replaced"
    )


@pytest.mark.parametrize(("failed", "base_failed"), [("A1", True), ("B2", False)])
def test_failed_rank_of_the_base_is_no_failure_of_the_candidate(failed: str, base_failed: bool) -> None:
    died = RankFailure(rank=0, cause=Cause.DIED, what="exited with status 7", detail="")
    pool = failing_pool(SetFailure(failed, "at open", [died]))
    sides = Sides(base=Side(name="A"), candidate=Side(name="B"), spec_fields={})
    benchmark: Any = None
    measure = Measure(benchmark, pool, lambda measured, fresh: [], sides=sides)
    side = "base" if base_failed else "candidate"
    with pytest.raises(pytest.fail.Exception, match=f"^the {side}'s rank 0 of set {failed} exited with"):
        measure(SPEC)
    assert measure.ended_as is (OutcomeKind.BASE_FAILED if base_failed else None)
