"""The verdict: FAIL goes before NO VERDICT, and anything missing is never a PASS."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.plugin.control_steps import COPY_CLASS
from ddpperf.results.outcomes import Outcome, OutcomeKind, Reason, Status
from ddpperf.verdict.estimates import Control, Estimates, Stage
from ddpperf.verdict.rows import rows
from ddpperf.verdict.verdict import Answer, Context, answer_of, decide, exit_status, needs_no_repeat
from tests.generated import BOUNDED
from tests.judged import GPU, LIMITS, PASSED, answered, control, equal, estimate, verdict_of

TESTS = st.sampled_from(["a", "b", "c", "d"])
OUTCOMES = st.builds(
    Outcome,
    kind=st.sampled_from(list(OutcomeKind)),
    reason=st.text(max_size=3),
)
REASONS = st.lists(st.builds(Reason, st.just("there was a problem"), st.just("solve it")), max_size=1)
SLOWER = [estimate(1, 1.5), estimate(1, 1.5, stage=Stage.REPEAT), *equal(30)[2:]]


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    worse = draw(st.dictionaries(TESTS, st.just("is worse: its time is 2")))
    return Answer(
        worse=worse,
        regressions=[f"{test} {how}" for test, how in worse.items()],
        untrusted=draw(REASONS),
        undecided=draw(REASONS),
    )


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `decide`: any outcomes, any of them measured, any answer and problems."""
    return {
        "outcomes": draw(st.dictionaries(TESTS, OUTCOMES)),
        "measured": draw(st.sets(TESTS)),
        "answer": draw(st.none() | answers()),
        "problems": draw(REASONS),
    }


GOOD: dict[str, Any] = {
    "outcomes": {"test1": PASSED, "test2": PASSED},
    "measured": {"test1", "test2"},
    "answer": answered(equal(2)),
}


def undecided(*estimates: Estimates, pairs: int = 30) -> Answer:
    """Return the answer to some pairs, of which the first have these estimates instead."""
    own = {entry.key for entry in estimates}
    return answered([*estimates, *(entry for entry in equal(pairs) if entry.key not in own)])


# --- of the whole run


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
@given(runs())
def test_worse_test_outranks_missing_results(run: dict[str, Any]) -> None:
    run["answer"] = answered(SLOWER, missing={"y": "was not measured"})
    verdict = decide(**run)
    assert verdict.status is Status.FAIL
    assert any(reason.startswith("test1 is worse: its time is 1.500 times") for reason in verdict.reasons)


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


# --- what a PASS allows


def percentages(line: str) -> set[str]:
    """Return the percentages with a decimal, which are measured ones."""
    return set(re.findall(r"-?\d+\.\d%|inf%", line))


@BOUNDED
@given(st.lists(st.tuples(st.floats(0.9, 1.01), st.floats(1e-4, 0.004)), min_size=1, max_size=25))
def test_pass_claims_only_what_a_row_excludes(pairs: list[tuple[float, float]]) -> None:
    estimates = [
        estimate(number, ratio, metric=metric, noise=noise)
        for number, (ratio, noise) in enumerate(pairs, 1)
        for metric in ("time", "mean_time")
    ]
    answer = answered(estimates)
    verdict = verdict_of(answer)
    assert verdict.status in (Status.PASS, Status.NO_VERDICT)
    if verdict.status is Status.PASS:
        ends = {math.ceil(1000 * max(0, row.high - 1)) for row in rows(estimates, GPU)}
        claimed = {round(10 * float(found[:-1])) for found in percentages(verdict.reasons[0])}
        assert claimed, verdict
        assert claimed <= ends


def test_pass_claims_no_bound_where_there_is_none() -> None:
    """The stored run has too few steps for a mean, and the run had no time to measure test1 again."""
    unknown = estimate(1, metric="mean_time", stage=Stage.STORED, round_error=math.inf)
    verdict = verdict_of(undecided(estimate(1, stage=Stage.STORED), unknown))
    assert verdict.status is Status.PASS
    assert verdict.reasons[0].endswith("; undecided: the mean time of test1")
    assert not percentages(verdict.reasons[0]) & {"inf%"}


def test_pass_says_what_half_most_and_all_pairs_exclude() -> None:
    """The mean times of 40 pairs decide: 20 did not change, 18 are slower by 0.2%, and 2 by 0.4%."""
    slower = [0.0] * 20 + [0.002] * 18 + [0.004] * 2
    means = [estimate(number, 1 + by, metric="mean_time") for number, by in enumerate(slower, 1)]
    estimates = [*means, *(entry for entry in equal(40) if entry.key.metric == "time")]
    high = {row.ratio: row.high for row in rows(means, GPU)}
    half, most, last = (f"{math.ceil(1000 * (high[ratio] - 1)) / 10}%" for ratio in sorted(high))
    (line,) = verdict_of(answered(estimates)).reasons
    assert f"exclude a slow-down of {half}, 95% of them {most}, all {last}, in at least" in line


def test_pass_says_how_many_steps_it_rests_on() -> None:
    """A stall that is rarer than 3 in so many steps may not have occurred."""
    (line,) = verdict_of(answered([*equal(3), estimate(4, steps=84)])).reasons
    assert "exclude a slow-down of " in line
    assert "in at least 84 timed steps per side" in line


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (estimate(1, 1.015, noise=0.01), "time is 1.015"),  # above half of its tolerance
        (estimate(1, 1.015, noise=0.01, metric="mean_time"), "mean time is 1.015"),
        (estimate(1, 1.015, noise=0.01, metric="peak_memory_bytes"), "peak memory is 1.015"),
        (estimate(1, 1.009), "time is 1.009"),  # suspicious: below that half, but above its margin
    ],
)
def test_single_test_that_may_be_slower_blocks_a_pass(entry: Estimates, words: str) -> None:
    """It is 1 of 30, so fewer than 5% are undecided."""
    verdict = verdict_of(undecided(entry))
    assert verdict.status is Status.NO_VERDICT
    found = f"1 of 30 measurements is undecided, such as test1: its {words} times the base's"
    assert verdict.reasons[0].startswith(found)


@pytest.mark.parametrize(
    ("estimates", "why"),
    [
        ([estimate(1, 1.0, noise=0.3), estimate(2, 1.0, noise=0.3)], "neither found nor excluded"),
        ([estimate(1, 1.5)], "but it was not measured again on new process sets"),
        (
            [estimate(1, 1.1, noise=0.03), estimate(1, 1.052, noise=0.03, stage=Stage.REPEAT)],
            "but this is too uncertain for a FAIL",
        ),
    ],
)
def test_undecided_test_says_why(estimates: list[Estimates], why: str) -> None:
    verdict = verdict_of(undecided(*estimates))
    assert verdict.status is Status.NO_VERDICT
    assert verdict.reasons[0].endswith(why)


def test_run_that_looks_worse_is_no_baseline() -> None:
    """Later runs of the slower code would pass beside it."""
    answer = undecided(estimate(1, 1.5))
    assert verdict_of(answer).status is Status.NO_VERDICT
    assert answer.unfit[0].startswith("test1 looks worse: its time is 1.500 times the base's")
    assert undecided(estimate(1, noise=0.3), estimate(2, noise=0.3)).unfit == []


@pytest.mark.parametrize("metric", ["time", "mean_time", "peak_memory_bytes"])
def test_two_undecided_of_thirty_block_a_pass(metric: str) -> None:
    noisy = [estimate(number, metric=metric, noise=0.02) for number in (1, 2)]
    again = [estimate(number, metric=metric, noise=0.03, stage=Stage.REPEAT) for number in (1, 2)]
    for estimates in (noisy, [*noisy, *again]):
        verdict = verdict_of(undecided(*estimates))
        assert verdict.status is Status.NO_VERDICT
        assert verdict.reasons[0].startswith("2 of 30 measurements are undecided")


@pytest.mark.parametrize(
    ("ratios", "passes"), [((1.0,), True), ((1.0, 1.0), False), ((1.015,), False), ((1.06,), False)]
)
def test_one_undecided_of_thirty_needs_no_repeat_unless_it_looks_slower(
    ratios: tuple[float, ...], passes: bool
) -> None:
    first = [estimate(number, ratio, noise=0.01) for number, ratio in enumerate(ratios, 1)]
    own = {entry.key for entry in first}
    every = [*first, *(entry for entry in equal(30) if entry.key not in own)]
    assert needs_no_repeat(rows(every, GPU)) == passes
    assert (verdict_of(undecided(*first)).status is Status.PASS) == passes


def test_undecided_row_that_may_hide_twice_the_tolerance_is_repeated() -> None:
    first = [estimate(1, noise=0.04), *equal(30)[2:]]
    assert verdict_of(answered(first)).status is Status.PASS
    assert not needs_no_repeat(rows(first, GPU))


def test_pairs_that_have_only_bytes_do_not_make_up_for_undecided_times() -> None:
    noisy = [estimate(number, noise=0.01) for number in (1, 2)]
    sent = [estimate(number, metric="communicated_bytes_per_epoch", noise=0.0) for number in range(10, 50)]
    others = [estimate(number) for number in range(3, 10)]
    verdict = verdict_of(answered([*noisy, *others, *sent]))
    assert verdict.status is Status.NO_VERDICT
    assert verdict.reasons[0].startswith("2 of 9 measurements are undecided")


def test_finding_without_a_negative_control_does_not_count() -> None:
    slower = [estimate(1, 1.5, stage=stage) for stage in (Stage.FIRST, Stage.REPEAT)]
    found = rows(slower, GPU, [slower[1].key])
    answer = answer_of(found, slower, Context(missing={}))
    assert answer.regressions
    assert verdict_of(answer).status is Status.NO_VERDICT
    assert verdict_of(answer).reasons[0].startswith("the negative control was not measured")


# --- names


def test_tests_of_one_pair_fail_together() -> None:
    shared = [dataclasses.replace(entry, tests=("test1", "other")) for entry in SLOWER[:2]]
    answer = answered([*shared, *SLOWER[2:]])
    assert answer.worse.keys() == {"test1", "other"}
    (sentence,) = answer.regressions
    assert sentence.endswith("; other tests with this measurement: other")


def test_mean_that_grew_as_the_time_is_not_repeated_in_the_sentence() -> None:
    mean = [dataclasses.replace(entry, key=equal(1)[1].key) for entry in SLOWER[:2]]
    assert "mean time" not in answered([*SLOWER, *mean]).regressions[0]
    stalls = [estimate(1, 3.0, metric="mean_time", stage=entry.stage) for entry in mean]
    assert "mean time is 3.000 times" in answered([*SLOWER, *stalls]).regressions[0]


# --- each cause has its own next step


def stored(*ratios: float) -> list[Estimates]:
    return [estimate(number, ratio, stage=Stage.STORED) for number, ratio in enumerate(ratios, 1)]


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (undecided(*(estimate(number, noise=0.1) for number in range(1, 9))), "end other programs"),
        (answered(equal(2), missing={"z": "has time of 1 base process set"}), "run the same command again"),
        (answered(equal(29), cannot=["z"]), "deselect these tests"),
        (answered([*equal(9), control(Control.COPY, 1.1)]), "end other programs"),
        (answered([]), "add a test of a training step"),
    ],
    ids=["noise", "lost set", "cannot", "copy", "none judged"],
)
def test_each_cause_has_its_next_step(answer: Answer, advice: str) -> None:
    verdict = verdict_of(answer)
    assert verdict.status is Status.NO_VERDICT
    assert verdict.advice.startswith(advice), verdict


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (OutcomeKind.BASE_FAILED, "repair the base"),
        (OutcomeKind.NOT_COLLECTED, "correct this file"),
        (OutcomeKind.NOT_RUN, "run the same command again"),
    ],
)
def test_unmeasured_test_has_its_next_step(kind: OutcomeKind, advice: str) -> None:
    outcomes = GOOD["outcomes"] | {"z": Outcome(kind=kind)}
    assert decide(**GOOD | {"outcomes": outcomes}).advice.startswith(advice)


def test_slower_copy_voids_what_rests_on_the_stored_run() -> None:
    """The A/B measurement of test1 has a copy of its own."""
    copy = control(Control.STORED_COPY, 1.5, stage=Stage.STORED, noise_class=COPY_CLASS)
    wide = dataclasses.replace(LIMITS, tolerance=0.05)
    rest = [dataclasses.replace(entry, limits=wide) for entry in stored(*[1.0] * 9)]
    answer = answered([*rest, copy], compared_with="x.json")
    assert answer.undecided[0].text.startswith(
        "this machine or its environment changed: a copy of memory takes 1.50 times as long as in x.json"
    )
    measured_ab = [estimate(number) for number in range(1, 10)]
    assert not answered([*rest, copy, *measured_ab], compared_with="x.json").undecided
