"""The comparison with a stored run: changes, missing tests and their reasons."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.results.samples import Measured
from ddpperf.specs import AllReduceSpec, SamplerSpec, Spec, TrainingSpec
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.judged_work import LAUNCH_BOUND
from ddpperf.verdict.stored_run_comparison import Change, Comparison
from tests import stored
from tests.generated import BOUNDED, measurements
from tests.stored import QUIET, measured

STEP = TrainingSpec(world_size=2, per_rank_batch_size=32, strategy="ddp")
compared = partial(stored.compared, limit=1.5)
Counters = dict[str, tuple[float, ...]]


def test_ratio_is_of_medians() -> None:
    comparison = compared({"t": measured(0.2, 0.3, 9.0)}, {"t": measured(0.1, 0.1, 0.2, 0.1)})
    assert comparison.changes == {"t": Change(then_seconds=0.1, now_seconds=0.3, limit=1.5, tolerance=0.5)}
    assert comparison.changes["t"].ratio == pytest.approx(3)
    assert comparison.missing == {}


def test_steps_are_compared_rather_than_rounds() -> None:
    comparison = compared({"t": measured(0.5, iterations=64)}, {"t": measured(0.5, iterations=2)})
    assert comparison.changes["t"].ratio == 1


@pytest.mark.parametrize(
    "change", [{"model": "resnet50_cifar"}, {"data": "cifar10"}, {"delay_seconds": 0.001}]
)
def test_other_work_with_equal_id_is_missing(change: dict[str, Any]) -> None:
    other = dataclasses.replace(STEP, **change)
    comparison = compared({"t": measured(0.1, spec=other)}, {"t": measured(0.1, spec=STEP)})
    assert comparison.changes == {}
    assert comparison.missing == {"t": "measures another spec than in 0001_x.json"}


def test_resumed_run_is_missing() -> None:
    """One that was complete trains nothing, in no time."""
    resumed = with_counters(measured(0.001), {"resumed_epochs": (1.0, 1.0)})
    (why,) = compared({"t": measured(0.1)}, {"t": resumed}).missing.values()
    assert why.startswith("resumed from a checkpoint in 0001_x.json, so that its time is not")


@BOUNDED
@given(
    st.dictionaries(st.sampled_from("abcd"), measurements()),
    st.dictionaries(st.sampled_from("abcd"), measurements()),
    st.sets(st.sampled_from("abcde")),
)
def test_each_expected_test_is_changed_or_missing(
    now: dict[str, Measured], then: dict[str, Measured], expected: set[str]
) -> None:
    comparison = compared(now, then, expected)
    assert comparison.changes.keys() | comparison.missing.keys() == expected & then.keys()
    assert not comparison.changes.keys() & comparison.missing.keys()
    assert set(comparison.new) == now.keys() - then.keys()
    assert all(now[test].spec == then[test].spec for test in comparison.changes)


@pytest.mark.parametrize(
    ("then", "now", "slower"), [(2.0, 3.0, False), (2.0, 3.01, True), (2.0, 1.0, False), (1.0, 100.0, True)]
)
def test_slower_is_what_exceeds_the_limit(then: float, now: float, slower: bool) -> None:
    change = Change(then_seconds=then, now_seconds=now, limit=1.5, tolerance=0.5)
    comparison = Comparison(baseline="0001_x.json", changes={"t": change})
    assert comparison.slower == ({"t": change} if slower else {})


def test_median_shift_is_of_logs() -> None:
    then = {str(number): measured(1.0) for number in range(4)}
    now = {str(number): measured(ratio) for number, ratio in enumerate((0.5, 1.0, 4.0, 9.0))}
    assert compared(now, then).median_shift() == pytest.approx(math.log(2))


# --- bound by launches


def counted(launch_bound: float | None, cpu_seconds: float | None, step_seconds: float = 0.1) -> Measured:
    """A set of two ranks, of which the second counted more; None for a counter that nobody has."""
    counters = {"device_seconds": launch_bound and step_seconds / launch_bound, "cpu_seconds": cpu_seconds}
    return with_counters(
        measured(step_seconds),
        {name: (value / 2, value) for name, value in counters.items() if value is not None},
    )


def with_counters(one: Measured, *by_set: Counters) -> Measured:
    """The same with as many sets as there are `by_set`, and these counters."""
    sets = (
        dataclasses.replace(one.samples[0], set=f"A{number}", counters=each)
        for number, each in enumerate(by_set, 1)
    )
    return dataclasses.replace(one, samples=tuple(sets))


@pytest.mark.parametrize(("then", "now"), [(1.06, 3.6), (1.06, None)])
def test_launch_bound_baseline_compares_cpu_seconds(then: float | None, now: float | None) -> None:
    """By the rank that needed most, whatever the times did, and whatever limit was set on them."""
    comparison = compared({"t": counted(now, 0.006, step_seconds=9.0)}, {"t": counted(then, 0.005)})
    assert comparison.changes == {
        "t": Change(
            then_seconds=0.005, now_seconds=0.006, limit=math.inf, quantity="CPU seconds", judged=False
        )
    }
    assert not comparison.missing
    assert not comparison.slower


@pytest.mark.parametrize(
    ("then", "now"), [(LAUNCH_BOUND, LAUNCH_BOUND), (None, 1.0), (1.0, None), (1.0, 3.6), (3.6, 1.0)]
)
def test_other_steps_compare_times(then: float | None, now: float | None) -> None:
    """Nor what they bound no more: a device that takes longer than all launches would not be noticed."""
    comparison = compared({"t": counted(now, 0.006, step_seconds=0.12)}, {"t": counted(then, None)})
    assert comparison.changes == {"t": Change(then_seconds=0.1, now_seconds=0.12, limit=1.5, tolerance=0.5)}


def test_captured_steps_compare_times() -> None:
    """A captured step that waits is what has to be noticed, and its CPU seconds are few and move."""
    step = TrainingSpec(world_size=1, per_rank_batch_size=8, strategy="single", execution="graph")
    then = dataclasses.replace(counted(2.0, 0.005), spec=step)
    comparison = compared(
        {"t": dataclasses.replace(counted(9.0, 0.005, step_seconds=0.3), spec=step)}, {"t": then}
    )
    slower = Change(then_seconds=0.1, now_seconds=0.3, limit=1.5, tolerance=0.5)
    assert comparison.slower == {"t": slower}


def test_cpu_seconds_are_for_information_only() -> None:
    sides = {"t": counted(2.0, 0.04)}, {"t": counted(2.0, 0.004)}
    comparison = compared(*sides, limit=1.01, history=[sides[1]] * 2)
    assert (comparison.looks_slower, comparison.to_confirm(), comparison.median_shift()) == ({}, [], None)


@pytest.mark.parametrize(
    ("then", "now", "side"),
    [
        (None, 0.005, "0001_x.json"),
        (0.005, None, "this run"),
        (0.0, 0.005, "0001_x.json"),
    ],
)
def test_launch_bound_without_cpu_seconds_is_missing(
    then: float | None, now: float | None, side: str
) -> None:
    comparison = compared({"t": counted(None, now)}, {"t": counted(2.0, then)})
    assert comparison.changes == {}
    assert comparison.missing == {"t": f"is launch bound, and {side} has no CPU seconds of it to compare"}


def test_of_several_sets_the_median_counts() -> None:
    bound: list[Counters] = [
        {"device_seconds": (0.1 / bound,), "cpu_seconds": (cpu,)}
        for bound, cpu in ((1.0, 0.004), (1.1, 0.006), (1.2, 0.009))
    ]
    free: list[Counters] = [
        {"device_seconds": (0.1 / bound,), "cpu_seconds": (0.009,)} for bound in (1.0, 1.0, 9.0)
    ]
    now = with_counters(measured(0.1), *free)
    then = with_counters(measured(0.1), *bound)
    assert compared({"t": now}, {"t": now}).changes["t"].quantity == "step"
    change = compared({"t": then}, {"t": then}).changes["t"]
    assert (change.quantity, change.then_seconds, change.now_seconds) == ("CPU seconds", 0.006, 0.006)


# --- which tests are judged, and which are confirmed first


def change(ratio: float, limit: float, suspect_limit: float | None = None, **fields: Any) -> Change:
    return Change(then_seconds=1.0, now_seconds=ratio, limit=limit, suspect_limit=suspect_limit, **fields)


def order(**changes: Change) -> list[str]:
    return Comparison(baseline="0001_x.json", changes=changes).to_confirm()


def test_most_suspicious_tests_are_confirmed_first() -> None:
    """The log of the ratio counts in logs of the limit, and suspects come before wide limits."""
    found = order(
        narrow=change(1.0, 1.25, 1.1),
        suspect=change(1.15, 1.2, 1.1),
        wide=change(1.0, 1.3, 1.1),
        slower=change(1.3, 1.2, 1.1),
        noisy=change(2.0, 3.0, 1.5),
        captured=change(1.0, 1.04, 1.02, tolerance=0.03),
    )
    assert found == ["slower", "suspect", "noisy", "wide", "captured"]


def test_limit_of_one_orders_suspects() -> None:
    """As --benchmark-compare-fail=median:0% sets it: the log of the limit is 0."""
    assert order(little=change(1.01, 1.0), more=change(1.1, 1.0)) == ["more", "little"]


@pytest.mark.parametrize(
    ("spec", "device", "judged"),
    [
        (AllReduceSpec(world_size=2, nbytes=2**24 - 4), "cpu", False),
        (AllReduceSpec(world_size=2, nbytes=2**24), "cpu", True),
        (SamplerSpec(world_size=2, epoch_images=1024), "cpu", False),
        (AllReduceSpec(world_size=2, nbytes=2**24 - 4), "cuda", False),
        (AllReduceSpec(world_size=2, nbytes=2**24 - 4, execution="graph"), "cuda", True),
    ],
)
def test_informational_work_fails_no_run(spec: Spec, device: str, judged: bool) -> None:
    now, then = {"t": measured(9.0, spec=spec)}, {"t": measured(0.1, spec=spec)}
    comparison = compared(now, then, device=device)
    assert comparison.changes["t"].judged == judged
    assert set(comparison.slower) == set(comparison.to_confirm()) == ({"t"} if judged else set())
    answer = answer_of(comparison, None, no_stored_code="no git")
    assert set(answer.worse) == ({"t"} if judged else set())
    if not judged:
        assert "1 test for information only" in answer.summary or "no test is judged" in answer.summary


def test_calls_have_their_own_spread_between_runs() -> None:
    runs = {"step": measured(*QUIET, spec=STEP), "call": measured(*QUIET)}
    for device in ("cuda", "cpu"):
        changes = compared(runs, runs, limit=None, device=device).changes
        assert changes["call"].limit > changes["step"].limit, device


def test_tests_of_one_spec_share_the_error_probability() -> None:
    shared = {f"t{number}": measured(*QUIET) for number in range(5)}
    alone = compared({"t0": shared["t0"]}, {"t0": shared["t0"]}, limit=None).changes["t0"].limit
    assert compared(shared, shared, limit=None).changes["t0"].limit == alone
    own = {
        f"t{number}": measured(*QUIET, spec=AllReduceSpec(world_size=2, nbytes=2 ** (24 + number)))
        for number in range(5)
    }
    assert compared(own, own, limit=None).changes["t0"].limit > alone
