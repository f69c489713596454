"""The verdict: FAIL goes before NO VERDICT, and anything missing is never a PASS."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.results.outcomes import Outcome, OutcomeKind, Status
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.run_verdict import decide, exit_status
from ddpperf.verdict.stored_run_comparison import Change, Comparison, Controls
from tests.generated import BOUNDED, seconds

TESTS = st.sampled_from(["a", "b", "c", "d"])
OUTCOMES = st.builds(
    Outcome,
    kind=st.sampled_from(list(OutcomeKind)),
    reason=st.text(max_size=3),
)
CHANGES = st.builds(Change, then_seconds=seconds, now_seconds=seconds, limit=st.floats(1, 3))
SAME = Change(then_seconds=0.1, now_seconds=0.1, limit=1.2)
SLOWER = Change(then_seconds=0.1, now_seconds=0.16, limit=1.5)
PASSED = Outcome(kind=OutcomeKind.PASSED)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `decide`: any outcomes, any of them measured, any comparison and problems."""
    changes = draw(st.dictionaries(TESTS, CHANGES))
    comparison = Comparison(
        baseline="0001_x.json",
        changes=changes,
        missing=draw(st.dictionaries(TESTS, st.just("is new"))),
    )
    return {
        "outcomes": draw(st.dictionaries(TESTS, OUTCOMES)),
        "measured": draw(st.sets(TESTS)),
        "answer": draw(st.sampled_from([None, answer_of(comparison, None, no_stored_code="no git")])),
        "problems": draw(st.lists(st.just("there was a problem"), max_size=1)),
    }


GOOD: dict[str, Any] = {
    "outcomes": {"a": PASSED, "b": PASSED},
    "measured": {"a", "b"},
    "answer": answer_of(
        Comparison(baseline="0001_x.json", changes={"a": SAME, "b": dataclasses.replace(SAME, limit=1.1)}),
        None,
        no_stored_code="no git",
    ),
}


def test_pass_says_what_it_was_compared_with() -> None:
    verdict = decide(**GOOD)
    assert (verdict.status, verdict.reasons) == (
        Status.PASS,
        (
            "2 tests measured, compared with 0001_x.json: half of the 2 judged tests would have shown a "
            "slow-down of 15.0%, 95% of them 20.0%",
        ),
    )
    skipped = {"a": PASSED, "b": Outcome(kind=OutcomeKind.SKIPPED, reason="it needs a GPU")}
    verdict = decide(skipped, measured=["a"], answer=None)
    assert (verdict.status, verdict.reasons) == (
        Status.PASS,
        ("1 test measured, 1 skipped, not compared with a baseline: no --benchmark-compare was given",),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"measured": set()},
        {"measured": {"a"}},
        {"answer": dataclasses.replace(GOOD["answer"], undecided=["z was not measured"])},
        {"outcomes": {"a": PASSED, "b": PASSED, "z": Outcome(kind=OutcomeKind.NOT_RUN)}},
        {"outcomes": {"a": PASSED, "b": PASSED, "z": Outcome(kind=OutcomeKind.NOT_COLLECTED)}},
        {"problems": ["no baseline for h200x4"]},
        {"outcomes": {}, "measured": set(), "answer": None},
        {"outcomes": {"a": Outcome(kind=OutcomeKind.SKIPPED)}, "measured": set(), "answer": None},
    ],
    ids=lambda change: " ".join(change),
)
def test_anything_missing_is_no_verdict(change: dict[str, Any]) -> None:
    assert decide(**GOOD | change).status is Status.NO_VERDICT


@BOUNDED
@given(runs())
def test_pass_has_nothing_missing(run: dict[str, Any]) -> None:
    verdict = decide(**run)
    assert verdict.reasons
    if verdict.status is Status.PASS:
        assert run["measured"]
        assert not run["problems"]
        assert all(
            outcome.kind.skipped or outcome.kind is OutcomeKind.PASSED for outcome in run["outcomes"].values()
        )
        assert {
            test for test, outcome in run["outcomes"].items() if outcome.kind is OutcomeKind.PASSED
        } <= run["measured"]
        assert run["answer"] is None or not (run["answer"].undecided or run["answer"].worse)


@BOUNDED
@given(runs(), OUTCOMES)
def test_failed_test_outranks_everything(run: dict[str, Any], other: Outcome) -> None:
    run["outcomes"] |= {"z": Outcome(kind=OutcomeKind.FAILED, reason="rank 1 died"), "y": other}
    verdict = decide(**run)
    assert verdict.status is Status.FAIL
    assert "z failed: rank 1 died" in verdict.reasons


@BOUNDED
@given(runs(), st.floats(1.001, 3))
def test_slower_test_outranks_missing_results(run: dict[str, Any], limit: float) -> None:
    slower = Change(then_seconds=1.0, now_seconds=limit * 1.001, limit=limit)
    comparison = Comparison(baseline="0001_x.json", changes={"z": slower}, missing={"y": "is new"})
    run["answer"] = answer_of(comparison, None, no_stored_code="no git")
    verdict = decide(**run)
    assert verdict.status is Status.FAIL
    assert any(reason.startswith("z is slower: ") for reason in verdict.reasons)


def test_a_failure_names_every_failed_and_slower_test() -> None:
    outcomes = {
        "a": Outcome(kind=OutcomeKind.FAILED, reason="rank 1 died"),
        "b": PASSED,
        "c": Outcome(kind=OutcomeKind.NOT_RUN),
    }
    comparison = Comparison(
        baseline="0001_x.json", changes={"b": SLOWER}, missing={"c": "is not in 0001_x.json"}
    )
    verdict = decide(
        outcomes,
        measured={"b"},
        answer=answer_of(comparison, None, no_stored_code="no git"),
        problems=["the run was interrupted"],
    )
    assert verdict.reasons == (
        "a failed: rank 1 died",
        "b is slower: 1.60 times its step in 0001_x.json, limit 1.5",
    )


def test_no_verdict_names_everything_missing() -> None:
    outcomes = {
        "a": PASSED,
        "b": Outcome(kind=OutcomeKind.NOT_RUN),
        "c.py": Outcome(kind=OutcomeKind.NOT_COLLECTED, reason="SyntaxError"),
    }
    comparison = Comparison(baseline="0001_x.json", missing={"a": "is not in 0001_x.json"})
    verdict = decide(
        outcomes,
        measured=(),
        answer=answer_of(comparison, None, no_stored_code="no git"),
        problems=["the run was interrupted"],
    )
    assert verdict.reasons == (
        "the run was interrupted",
        "c.py could not be collected: SyntaxError",
        "b was not run",
        "a passed without a measurement",
        "no test was measured",
        "a is not in 0001_x.json",
        "no test of 0001_x.json was measured whose time can be judged on this machine",
    )


@pytest.mark.parametrize(
    ("status", "saved", "exits"),
    [
        (Status.PASS, True, 0),
        (Status.FAIL, True, 1),
        (Status.NO_VERDICT, True, 125),
        (Status.PASS, False, 4),
        (Status.FAIL, False, 1),
        (Status.NO_VERDICT, False, 4),
    ],
)
def test_exit_status_follows_status_and_saving(status: Status, saved: bool, exits: int) -> None:
    assert exit_status(status, saved=saved) == exits


def test_failed_control_of_a_comparison_is_no_verdict() -> None:
    """A slower test counts for nothing where the machine itself has changed."""
    copy = Change(then_seconds=1.0, now_seconds=2.0, limit=1.5)
    comparison = Comparison(baseline="0001_x.json", changes={"a": SLOWER}, controls=Controls(negative=copy))
    answer = answer_of(comparison, None, no_stored_code="no git")
    assert [reason[:27] for reason in answer.untrusted] == ["the negative control failed"]
    assert answer.unfit == [*answer.regressions, *answer.untrusted]
    assert decide({"a": PASSED}, measured={"a"}, answer=answer).status is Status.NO_VERDICT
