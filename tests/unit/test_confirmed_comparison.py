"""The answer of a comparison with a stored run, with and without an A/B run beside its code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpperf.results.outcomes import Outcome, OutcomeKind, Status
from ddpperf.verdict.ab import Decision, Row
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.estimates import Control, MetricEstimates
from ddpperf.verdict.run_verdict import Answer, decide
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.stored_run_comparison import Change, Comparison, Controls
from ddpperf.verdict.two_stage_test import Finding

NAME = "0001_x.json"
SETTINGS = read_decision({})["cpu"]
SLOW_COPY = Change(then_seconds=1.0, now_seconds=2.0, limit=1.5)


def change(ratio: float = 1.0, limit: float = 1.4, **fields: Any) -> Change:
    return Change(then_seconds=1.0, now_seconds=ratio, limit=limit, suspect_limit=1.2, **fields)


def row(test: str, finding: Finding = Finding.UNCHANGED, ratio: float = 1.0, **fields: Any) -> Row:
    """The row of a primary gated metric that would have shown 1%, unless `fields` says otherwise."""
    chosen: dict[str, Any] = {
        "metric": "time",
        "base": 1.0,
        "candidate": ratio,
        "detectable": 0.1,
        "tolerance": 0.25,
        "sets": 3,
        "gated": True,
        "primary": True,
    }
    interval = {"low": ratio * 0.99, "high": ratio * 1.01}
    return Row(test=test, finding=finding, ratio=ratio, **chosen | interval | fields)


def decision(
    *rows: Row, negative: Finding = Finding.UNCHANGED, positive: Finding = Finding.SUSPECT
) -> Decision:
    """An A/B run with these rows and its two controls."""

    def control(kind: Control, finding: Finding) -> Row:
        return row(f"{kind} control", finding, gated=False, primary=False, control=kind)

    made = Decision((), SETTINGS)
    made.rows = [*rows, control("negative", negative), control("positive", positive)]
    return made


def comparison(**changes: Change) -> Comparison:
    return Comparison(baseline=NAME, changes=changes)


def status(answer: Answer) -> Status:
    passed = {"t": Outcome(kind=OutcomeKind.PASSED)}
    return decide(passed, measured=passed, answer=answer).status


# --- without an A/B run


def test_narrow_limits_pass_without_confirmation() -> None:
    answer = answer_of(comparison(t=change(limit=1.2), u=change(limit=1.1)), None)
    assert status(answer) is Status.PASS
    assert answer.summary == (
        f"compared with {NAME}: half of the 2 judged tests would have shown a slow-down of 15.0%, "
        "95% of them 20.0%"
    )


def test_summary_has_a_sentence_for_each_tolerance() -> None:
    captured = {f"t{number}": change(limit=1.02 + number / 1e4, tolerance=0.03) for number in range(20)}
    answer = answer_of(comparison(u=change(limit=1.2), **captured), None)
    assert status(answer) is Status.PASS
    assert answer.summary == (
        f"compared with {NAME}: half of the 20 judged tests with tolerance 3% would have shown a slow-down "
        "of 2.1%, 95% of them 2.2%; 1 judged test with tolerance 25% would have shown a slow-down of 20.0%"
    )


def test_strict_limit_decides_without_confirmation() -> None:
    answer = answer_of(comparison(t=change(1.5), u=change(1.3)), None, no_stored_code="no git")
    assert answer.worse == {"t": f"is slower: 1.50 times its step in {NAME}, limit 1.4"}
    assert status(answer) is Status.FAIL
    assert answer.unfit == answer.regressions


def test_slowest_test_without_confirmation_is_first() -> None:
    answer = answer_of(comparison(t=change(1.5), u=change(1.9), v=change(1.6)), None, no_stored_code="no git")
    assert list(answer.worse) == ["u", "v", "t"]


def test_failed_copy_without_confirmation_is_untrusted() -> None:
    failed = replace(comparison(t=change(1.5)), controls=Controls(negative=SLOW_COPY))
    answer = answer_of(failed, None)
    assert [sentence[:27] for sentence in answer.untrusted] == ["the negative control failed"]
    assert status(answer) is Status.NO_VERDICT


def test_missing_control_without_confirmation_is_no_verdict() -> None:
    lacking = replace(comparison(t=change(limit=1.2)), controls=Controls(negative="no copy of memory"))
    assert answer_of(lacking, None).undecided == ["no copy of memory"]


@pytest.mark.parametrize("reason", ["the commit 1234 is gone", ""])
def test_wide_limits_need_a_reason(reason: str) -> None:
    answer = answer_of(comparison(t=change(limit=1.5), u=change(limit=1.2)), None, no_stored_code=reason)
    why = reason or "this machine is too noisy for them; repeat the run when it is quieter"
    assert answer.undecided == [
        f"1 of 2 tests would not have shown a slow-down as large as their tolerance, such as t (25%): {why}"
    ]
    assert status(answer) is Status.NO_VERDICT


# --- with an A/B run


def test_only_ab_findings_are_worse() -> None:
    """Neither a slower test that the stored code equals nor a suspect that it equals."""
    answer = answer_of(
        comparison(t=change(1.1), u=change(1.3)),
        decision(row("t", Finding.WORSE, 1.3, confirmed=True), row("u")),
    )
    assert answer.worse == {
        "t": "is worse: its time is 1.300 times the base's (1.287 to 1.313, "
        "measured again on new process sets)"
    }
    assert status(answer) is Status.FAIL


def test_slower_machine_is_no_verdict_with_differences() -> None:
    answer = answer_of(
        comparison(t=change(1.5), u=change(1.6)),
        decision(row("t"), row("u")),
        differences=["torch was 2.10 and is 2.11", "OMP_NUM_THREADS is new"],
    )
    assert (answer.worse, status(answer)) == ({}, Status.NO_VERDICT)
    assert answer.undecided == [
        f"this machine or its environment changed: t is slower: 1.50 times its step in {NAME}, limit 1.4, "
        "but the stored run's code takes as long today (and 1 more); differences: torch was 2.10 and is "
        "2.11; OMP_NUM_THREADS is new"
    ]


def test_changed_machine_without_known_difference_says_so() -> None:
    (sentence,) = answer_of(comparison(t=change(1.5)), decision(row("t"))).undecided
    assert sentence.endswith("differences: none was found in what is stored of the two environments")


def test_slower_copy_beside_code_is_a_changed_machine() -> None:
    slow = replace(comparison(t=change()), controls=Controls(negative=SLOW_COPY))
    answer = answer_of(slow, decision(row("t")))
    assert (answer.untrusted, status(answer)) == ([], Status.NO_VERDICT)
    assert answer.undecided[0].startswith("this machine or its environment changed: the negative control")


def test_confirmation_replaces_the_screenings_positive_control() -> None:
    """The machine may become faster between the step without and the step with a delay."""
    blind = Change(then_seconds=1.0, now_seconds=1.1, limit=1.125)
    failed = replace(comparison(t=change(limit=1.2)), controls=Controls(positive=blind))
    assert status(answer_of(failed, decision(row("t")))) is Status.PASS
    assert answer_of(failed, None).undecided == [
        "the positive control failed: a deliberately slowed step was found at 1.100 times its time, "
        "limit 1.125"
    ]


@pytest.mark.parametrize(("finding", "expected"), [("worse", Status.FAIL), ("unchanged", Status.NO_VERDICT)])
def test_failed_positive_control_prevents_only_pass(finding: str, expected: Status) -> None:
    beside = decision(row("t", Finding(finding), 1.3), positive=Finding.UNDECIDED)
    answer = answer_of(comparison(t=change()), beside)
    assert status(answer) is expected
    assert answer.undecided[0].startswith("the positive control failed: a deliberately slowed step was found")


def test_confirmation_without_a_step_needs_no_positive_control() -> None:
    """A whole training is not delayed. The positive control of the screening still counts."""
    made = decision(row("t"))
    made.rows = [each for each in made.rows if each.control != "positive"]
    assert status(answer_of(comparison(t=change()), made)) is Status.PASS
    blind = Change(then_seconds=1.0, now_seconds=1.1, limit=1.125)
    for positive in (blind, "the positive control was not measured"):
        without = replace(comparison(t=change()), controls=Controls(positive=positive))
        assert status(answer_of(without, made)) is Status.NO_VERDICT


def test_unmeasured_slower_test_is_no_verdict_without_reason() -> None:
    (sentence, _) = answer_of(comparison(t=change(1.5)), decision()).undecided
    assert sentence.endswith("was not compared with the stored run's code: its A/B measurement is missing")


def test_slower_but_undecided_test_is_no_verdict() -> None:
    answer = answer_of(comparison(t=change(1.5)), decision(row("t", Finding.UNDECIDED)))
    assert answer.undecided[0] == (
        f"t is slower: 1.50 times its step in {NAME}, limit 1.4, and the comparison with the "
        "stored run's code is undecided"
    )
    assert not any("environment changed" in sentence for sentence in answer.undecided)


def test_unreached_slower_test_is_no_verdict() -> None:
    answer = answer_of(comparison(t=change(1.5), u=change()), decision(row("u")), unconfirmed="time is over")
    assert (answer.worse, status(answer)) == ({}, Status.NO_VERDICT)
    assert answer.undecided[0] == (
        f"t is slower: 1.50 times its step in {NAME}, limit 1.4, and was not compared with the stored "
        "run's code: time is over"
    )


def test_regression_outranks_unreached_tests() -> None:
    answer = answer_of(comparison(t=change(1.5), u=change(1.5)), decision(row("u", Finding.WORSE, 1.4)))
    assert (set(answer.worse), status(answer)) == ({"u"}, Status.FAIL)


def test_failed_ab_control_is_untrusted() -> None:
    answer = answer_of(comparison(t=change()), decision(row("t", Finding.WORSE), negative=Finding.WORSE))
    assert answer.untrusted[0].startswith("the negative control failed: a copy of memory was found worse")
    assert status(answer) is Status.NO_VERDICT


def test_missing_suspect_is_no_verdict() -> None:
    made = decision(row("t", Finding.SUSPECT, 1.3))
    made.end()
    answer = answer_of(comparison(t=change()), made)
    assert "t could not be measured again, with time 1.300 times the base's" in answer.undecided
    assert status(answer) is Status.NO_VERDICT


def test_problems_of_the_ab_run_are_no_verdict() -> None:
    answer = answer_of(comparison(t=change()), decision(row("t")), problems=["a control is missing"])
    assert (answer.undecided, status(answer)) == (["a control is missing"], Status.NO_VERDICT)


# --- what would have been shown


def many(blind: int, rows: int = 20) -> Answer:
    """The answer for 20 tests with limits of 40%, of which the first `blind` rows are undecided."""
    tests = [f"t{number:02}" for number in range(20)]
    found = [
        row(test, Finding.UNDECIDED, high=1.3) if place < blind else row(test)
        for place, test in enumerate(tests[:rows])
    ]
    return answer_of(comparison(**dict.fromkeys(tests, change())), decision(*found))


@pytest.mark.parametrize(
    ("blind", "rows", "passes"), [(0, 20, True), (1, 20, True), (2, 20, False), (0, 19, True), (0, 18, False)]
)
def test_pass_needs_95_percent_of_tests(blind: int, rows: int, passes: bool) -> None:
    """An undecided test, or one that only its wide limit judged, would not have shown 25%."""
    assert (status(many(blind, rows)) is Status.PASS) == passes


@pytest.mark.parametrize(("high", "shown"), [(1.05, "5.0%"), (1.22, "22.0%"), (1.6, "40.0%")])
def test_undecided_test_may_hide_its_interval(high: float, shown: str) -> None:
    """But not more than the limit of the comparison with the stored run."""
    answer = answer_of(comparison(t=change()), decision(row("t", Finding.UNDECIDED, high=high)))
    assert f"would have shown a slow-down of {shown}" in answer.summary


def test_summary_says_what_95_percent_show() -> None:
    assert many(blind=1).summary == (
        f"compared with the code of {NAME}: half of the 20 judged tests would have shown a slow-down of "
        "1.0%, 95% of them 1.0%"
    )


def test_narrower_of_limit_and_ab_run_counts() -> None:
    found = decision(row("t", high=1.2), row("u", high=1.05))
    answer = answer_of(comparison(t=change(limit=1.1), u=change(limit=1.4)), found)
    assert "a slow-down of 7.5%, 95% of them 10.0%" in answer.summary


def test_other_rows_show_nothing() -> None:
    """A row that is not primary or not gated says nothing about its test."""
    rows = [row("t", primary=False), row("t", gated=False)]
    assert status(answer_of(comparison(t=change()), decision(*rows))) is Status.NO_VERDICT


def test_new_and_informational_tests_are_counted() -> None:
    changes = {"t": change(limit=1.2), "call": change(9.0, judged=False)}
    found = Comparison(baseline=NAME, changes=changes, new=["u", "v"])
    answer = answer_of(found, None)
    assert status(answer) is Status.PASS
    assert answer.summary.endswith("; 1 test for information only; 2 tests new, such as u")


def test_lost_test_is_no_verdict_beside_ab() -> None:
    lost = replace(comparison(t=change()), missing={"gone": f"is in {NAME} but was not measured"})
    answer = answer_of(lost, decision(row("t")))
    assert answer.undecided == [f"gone is in {NAME} but was not measured"]


def test_real_decision_confirms_a_slow_down() -> None:
    """From estimates: a slow-down of 30% in one of eight tests, which the stored run only suspects."""

    def estimates(test: str, by: float, base: tuple[float, ...], control: Control | None = None) -> Any:
        return MetricEstimates(
            test=test,
            metric="time",
            base=base,
            candidate=tuple(by * value for value in reversed(base)),
            noise_class="k",
            gated=control is None,
            primary=control is None,
            control=control,
        )

    tests = [f"t{number}" for number in range(8)]
    settings = SETTINGS.beside_stored_code("cpu")
    first = [estimates(test, 1.3 if test == "t0" else 1.0, (1.0, 1.1)) for test in tests]
    first += [estimates("negative control", 1.0, (1.0, 1.01), "negative")]
    first += [estimates("positive control", 1.25, (1.0, 1.02), "positive")]
    made = Decision(first, settings)
    assert (made.open_tests(), made.rows[0].finding) == (["t0"], Finding.SUSPECT)
    made.look([estimates("t0", 1.3, (1.0, 1.01, 1.02))])
    made.end()
    changes = {test: change(1.3 if test == "t0" else 1.0) for test in tests}
    answer = answer_of(comparison(**changes), made)
    assert (set(answer.worse), status(answer)) == ({"t0"}, Status.FAIL)


def test_clear_slow_down_is_decided_at_once() -> None:
    """The stored run suspected it already. An A/B run without a stored run only suspects it."""
    settings = replace(SETTINGS, confirms=True)
    clear = [replace(one, candidate=tuple(2 * value for value in one.base)) for one in noisy()]
    assert {row.finding for row in Decision(clear, settings).rows} == {Finding.WORSE}
    assert {row.finding for row in Decision(clear, SETTINGS).rows} == {Finding.SUSPECT}


def quiet(test: str, by: float, sets: tuple[float, ...] = (1.0, 1.02)) -> MetricEstimates:
    return MetricEstimates(
        test=test,
        metric="time",
        base=sets,
        candidate=tuple(by * value for value in sets),
        noise_class="k",
        gated=True,
        primary=True,
    )


@pytest.mark.parametrize(("repeated", "finding"), [(1.5, Finding.WORSE), (1.0, Finding.UNCHANGED)])
def test_contradicted_suspect_is_repeated_once(repeated: float, finding: Finding) -> None:
    """The first A/B measurement may have been disturbed, so only new process sets decide."""
    settings = SETTINGS.beside_stored_code("cpu")
    first = [quiet(f"t{number}", 1.0) for number in range(6)]
    assert Decision(first, settings).open_tests() == []
    made = Decision(first, settings, suspected=["t3"])
    assert made.open_tests() == ["t3"]
    made.look([quiet("t3", repeated, (1.0, 1.01, 1.02))])
    assert made.open_tests() == []
    assert {row.test: row.finding for row in made.rows}["t3"] is finding


# --- what an unchanged test must have been able to show


def noisy() -> list[MetricEstimates]:
    """Equal sides of two process sets each, which differ by 12%."""
    return [
        MetricEstimates(
            test=f"t{number}",
            metric="time",
            base=(number, 1.12 * number),
            candidate=(1.12 * number, number),
            noise_class="step",
            gated=True,
            primary=True,
        )
        for number in range(1, 7)
    ]


@pytest.mark.parametrize("confirms", [False, True])
def test_interval_within_tolerance_decides(confirms: bool) -> None:
    wide = replace(SETTINGS, default=replace(SETTINGS.default, tolerance=0.25), confirms=confirms)
    decision = Decision(noisy(), wide)
    found = decision.rows[0]
    assert found.high - 1 < found.tolerance
    assert (found.finding, found.undecided, decision.open_tests()) == (Finding.UNCHANGED, False, [])


def test_detectable_change_of_a_confirmation_is_the_end_of_the_interval() -> None:
    wide = replace(SETTINGS, default=replace(SETTINGS.default, tolerance=0.25))
    found = Decision(noisy(), replace(wide, confirms=True)).rows[0]
    assert found.detectable == pytest.approx(found.high - 1)


def test_test_with_its_own_tolerance_is_decided_by_it() -> None:
    """Such as a whole training on a GPU, among captured steps with a tolerance of 3%."""
    settings = replace(SETTINGS, confirms=True)
    lax = [replace(one, test=f"lax {one.test}", tolerance=0.25) for one in noisy()]
    decision = Decision([*noisy(), *lax], settings)
    assert decision.open_tests() == [one.test for one in noisy()]
    own = {row.test: row for row in Decision(noisy(), settings).rows}
    for row in decision.rows:
        same = own[row.test.removeprefix("lax ")]
        assert (row.low, row.high) == (same.low, same.high)


def test_large_speedup_is_not_measured_again() -> None:
    """Its interval excludes a slow-down, however wide it is."""
    faster = [replace(one, candidate=tuple(0.7 * value for value in one.base)) for one in noisy()]
    wide = replace(SETTINGS, default=replace(SETTINGS.default, tolerance=0.25), confirms=True)
    assert Decision(faster, wide).open_tests() == []


# --- without a confirmation


def test_interrupt_before_the_confirmation_is_no_failure() -> None:
    """Only the stored run's code could tell whether the machine is slower today."""
    answer = answer_of(comparison(t=change(1.5)), None, unconfirmed="the run was interrupted")
    assert (answer.worse, status(answer)) == ({}, Status.NO_VERDICT)
    assert answer.undecided[0].startswith("t is slower: 1.50 times ")
    assert answer.undecided[0].endswith(" compared with the stored run's code: the run was interrupted")


def test_suspect_that_was_not_measured_again_is_no_pass() -> None:
    suspect = Change(then_seconds=1.0, now_seconds=1.15, limit=1.2, suspect_limit=1.1)
    answer = answer_of(comparison(t=suspect, u=change()), decision(row("u")), unconfirmed="time is over")
    assert status(answer) is Status.NO_VERDICT
    assert answer.undecided[0].startswith("t looks slower: 1.15 times ")
    assert answer_of(comparison(t=suspect), decision(row("t"))).undecided == []
