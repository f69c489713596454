"""The decision of an A/B run: screening, confirmation, controls and the answer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.results.outcomes import Outcome, OutcomeKind, Status
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import AllReduceSpec, CollectiveSpec, EpochSpec, SamplerSpec, Spec, TrainingSpec
from ddpperf.verdict.ab import MOST_ADVISED, Decision, Row, ab_answer, control_problems
from ddpperf.verdict.estimates import Control, MetricEstimates, estimates_of
from ddpperf.verdict.run_verdict import decide
from ddpperf.verdict.settings import read_decision
from ddpperf.verdict.two_stage_test import Finding
from tests.generated import BOUNDED

GPU = read_decision({})["gpu"]
QUIET = (1.0, 1.001, 0.999)
FRESH = (1.0, 1.002, 0.998, 1.001, 0.999, 1.0)
STEP = TrainingSpec(world_size=2, per_rank_batch_size=8, strategy="ddp")


def reading(
    by: float = 1.0, test: str = "t", metric: str = "time", base: tuple[float, ...] = QUIET, **fields: object
) -> MetricEstimates:
    """A gated primary metric whose candidate has `by` times the base's values, in another order."""
    chosen = {"noise_class": "k", "gated": True, "primary": metric == "time", **fields}
    candidate = tuple(by * value for value in reversed(base))
    return MetricEstimates(test=test, metric=metric, base=base, candidate=candidate, **chosen)  # type: ignore[arg-type]


def suite(*more: MetricEstimates) -> list[MetricEstimates]:
    """Eight tests that did not change, the controls, and these."""
    controls = [
        reading(1, "negative control", control="negative"),
        reading(1.05, "positive control", control="positive"),
    ]
    return [
        *(reading(test=f"same{number}") for number in range(8)),
        *(replace(each, gated=False) for each in controls),
        *more,
    ]


def row(decision: Decision, test: str = "t", metric: str = "time") -> Row:
    (found,) = [row for row in decision.rows if (row.test, row.metric) == (test, metric)]
    return found


def verdict(decision: Decision, *problems: str) -> tuple[Status, tuple[str, ...]]:
    tests = {row.test: Outcome(kind=OutcomeKind.PASSED) for row in decision.rows if row.control is None}
    answer = ab_answer(decision.rows, decision.missing, problems=problems)
    made = decide(tests, measured=tests, answer=answer)
    return made.status, made.reasons


def test_unchanged_suite_passes_and_tells_its_reach() -> None:
    decision = Decision(suite(), GPU)
    assert decision.open_tests() == []
    status, (reason,) = verdict(decision)
    assert status is Status.PASS
    assert (
        "8 tests measured, nothing worse than the base: half of the tests would have shown a slow-down of"
        in reason
    )


def test_only_fresh_sets_confirm_a_suspect() -> None:
    decision = Decision(suite(reading(1.03)), GPU)
    assert decision.open_tests() == ["t"]
    decision.look([reading(1.03, base=FRESH)])
    assert (row(decision).finding, row(decision).confirmed) == (Finding.WORSE, True)
    assert row(decision).ratio == pytest.approx(1.03)
    status, (reason,) = verdict(decision)
    assert status is Status.FAIL
    assert reason.startswith("t is worse: its time is 1.030 times the base's (1.0")
    assert reason.endswith("measured again on new process sets)")

    decision = Decision(suite(reading(1.03)), GPU)
    decision.look([reading(1.0, base=FRESH)])
    assert row(decision).finding is Finding.UNCHANGED
    assert verdict(decision)[0] is Status.PASS


def test_the_largest_change_is_the_first_reason() -> None:
    """It may be of any metric, such as of a speedup that got smaller."""
    changes = {"small": (1.03,), "large": (1.03, 0.8), "middle": (1.1, 0.98), "speedups": (1.04, 0.85)}

    def readings(base: tuple[float, ...]) -> list[MetricEstimates]:
        return [
            reading(by, test, metric, base=base)
            for test, changed in changes.items()
            for by, metric in zip(changed, ("time", "speedup"), strict=False)
        ]

    decision = Decision(suite(*readings(QUIET)), GPU)
    decision.look(readings(FRESH))
    assert [reason.split()[0] for reason in verdict(decision)[1]] == ["large", "speedups", "middle", "small"]


def test_only_tests_of_one_measurement_share_a_reason() -> None:
    """Two tests may have equal ratios, to three digits, by chance."""
    tests = {"first": FRESH, "same": FRESH, "other": tuple(2 * value for value in FRESH)}
    decision = Decision(suite(*(reading(1.03, test) for test in tests)), GPU)
    decision.look([reading(1.03, test, base=base) for test, base in tests.items()])
    shared, alone = verdict(decision)[1]
    assert shared.startswith("first is worse")
    assert shared.endswith("; the same measurement is that of same")
    assert alone.startswith("other is worse")
    assert alone.removeprefix("other") in shared.removeprefix("first")


def test_suspect_without_confirmation_is_missing() -> None:
    for again in ([], [replace(reading(1.03, base=FRESH), base=(math.nan,) * 6)]):
        decision = Decision(suite(reading(1.03)), GPU)
        decision.look(again)
        decision.end()
        status, (reason,) = verdict(decision)
        assert status is Status.NO_VERDICT
        assert reason == "t could not be measured again, with time 1.030 times the base's"


def noisy_suite(*more: MetricEstimates) -> list[MetricEstimates]:
    """The suite, with six tests whose process sets differ by 2%: too noisy for their tolerance."""
    noisy = [
        reading(1, f"noisy{number}", base=(1.0, 1.02 + 1e-4 * number, 0.98), noise_class="noisy")
        for number in range(6)
    ]
    return suite(*noisy, *more)


MORE = (1.0, 1.001, 0.999, 1.002, 0.998, 1.0) * 4


def test_suspects_are_measured_before_undecided_tests() -> None:
    noisy = reading(1, "noisy", base=(1.0, 1.02, 0.98), noise_class="noisy")
    decision = Decision([noisy, *suite(reading(1.03))], GPU)
    assert decision.open_tests() == ["t", "noisy"]


def test_undecided_secondary_metric_opens_no_test() -> None:
    """The verdict asks only whether primary metrics are decided."""
    noisy = reading(1, metric="speedup", base=(1.0, 1.02, 0.98))
    decision = Decision(suite(reading(1), noisy), GPU)
    assert row(decision, metric="speedup").undecided
    assert decision.open_tests() == []


@pytest.mark.parametrize(("by", "finding"), [(1.0, Finding.UNCHANGED), (1.035, Finding.WORSE)])
def test_all_sets_decide_an_undecided_test(by: float, finding: Finding) -> None:
    """The new process sets alone would not count the first ones: the ratio is that of all together."""
    decision = Decision(noisy_suite(reading(1, base=(1.0, 1.02, 0.98), noise_class="noisy")), GPU)
    assert row(decision).finding is Finding.UNDECIDED
    decision.look([reading(by, base=MORE, noise_class="noisy")])
    found = row(decision)
    assert (found.finding, found.confirmed) == (finding, True)
    assert found.ratio == pytest.approx(by ** (24 / 27))


def test_second_look_adds_its_sets() -> None:
    """For a suspect those of both looks count, and not those of the screening."""
    wide = (1.0, 1.014, 0.986, 1.01, 0.99, 1.0)
    decision = Decision(suite(reading(1.03)), GPU)
    decision.look([reading(1.01, base=wide)])
    first = row(decision)
    assert (first.finding, decision.open_tests()) == (Finding.UNDECIDED, ["t"])
    decision.look([reading(1.02, base=wide)])
    second = row(decision)
    assert second.ratio == pytest.approx((1.01 * 1.02) ** 0.5)
    assert second.high / second.low < first.high / first.low


def test_decided_test_is_not_decided_again() -> None:
    decision = Decision(suite(reading(1.03), reading(1.03, "u")), GPU)
    decision.look([reading(1.0, base=FRESH), reading(1.03, "u", base=FRESH)])
    before = [row(decision, test) for test in ("t", "u")]
    decision.look([reading(2.0, base=FRESH), reading(0.5, "u", base=FRESH)])
    assert [row(decision, test) for test in ("t", "u")] == before


def test_unmeasured_undecided_test_stays_undecided() -> None:
    decision = Decision(noisy_suite(), GPU)
    assert len(decision.open_tests()) == 6
    decision.look([])
    decision.end()
    assert decision.missing == {}
    assert verdict(decision)[0] is Status.NO_VERDICT


def test_shared_measurement_counts_once_in_the_suite() -> None:
    """It cannot be worse by chance more than once, however many tests it stands for."""
    shared = [reading(1, f"shared{number}") for number in range(5)]
    assert Decision(shared, GPU).gated == 1
    other = replace(shared[0], test="other", candidate=(1.0, 1.0, 1.001))
    tail = [replace(each, metric="tail_seconds") for each in shared]
    assert Decision([*shared, other, *tail], GPU).gated == 3
    for fields in ({"gated": False}, {"metric": "gradients_bytes"}):
        assert Decision([*shared, replace(other, **fields)], GPU).gated == 1


@pytest.mark.parametrize(
    ("metric", "by", "finding"),
    [
        ("time", 1.03, Finding.SUSPECT),
        ("time", 0.97, Finding.BETTER),
        ("speedup", 0.97, Finding.SUSPECT),
        ("speedup", 1.03, Finding.BETTER),
        ("peak_memory_bytes", 1.03, Finding.SUSPECT),
        ("busbw_bytes_per_second", 0.97, Finding.SUSPECT),
        ("speedup_over_eager", 0.97, Finding.SUSPECT),
    ],
)
def test_each_metric_has_its_own_direction(metric: str, by: float, finding: Finding) -> None:
    others = [reading(1, f"other{number}", metric) for number in range(4)]
    decision = Decision([*others, reading(by, metric=metric)], GPU)
    found = row(decision, metric=metric)
    assert found.finding is finding
    assert found.ratio == pytest.approx(by)
    assert found.low < by < found.high


def test_faster_single_device_is_no_regression() -> None:
    def decided(time_by: float) -> Decision:
        more = [reading(1, f"same{number}", "speedup") for number in range(8)]
        decision = Decision(suite(*more, reading(time_by), reading(0.96, metric="speedup")), GPU)
        assert decision.open_tests() == ["t"]
        decision.look([reading(time_by, base=FRESH), reading(0.96, metric="speedup", base=FRESH)])
        return decision

    for time_by in (0.97, 0.999, 1.0005):  # the last is slower by less than chance explains
        assert row(decided(time_by), metric="speedup").finding is Finding.UNDECIDED
        assert verdict(decided(time_by))[0] is Status.PASS
    assert row(decided(1.004), metric="speedup").finding is Finding.WORSE
    assert verdict(decided(1.004))[0] is Status.FAIL


def test_lower_speedup_counts_if_the_step_is_slower() -> None:
    # Chance makes 22 of 10,000 equal steps this slow. 50 are allowed: the suite's 1% over two metrics.
    by = 1.003
    settings = replace(GPU, default=replace(GPU.default, margin=0.0), metrics={})
    decision = Decision([reading(1.02), reading(1 / 1.02, metric="speedup")], settings)
    assert decision.open_tests() == ["t"]
    decision.look([reading(by, base=FRESH), reading(1 / by, metric="speedup", base=FRESH)])
    assert [each.finding for each in decision.rows] == [Finding.WORSE, Finding.WORSE]


@pytest.mark.parametrize(
    "metric", ["communicated_bytes_per_epoch", "gradients_bytes", "buffers_bytes", "metrics_bytes"]
)
def test_an_exact_metric_is_worse_by_any_amount(metric: str) -> None:
    for by, status in ((1 + 1e-6, Status.FAIL), (1, Status.PASS), (1 - 1e-6, Status.PASS)):
        exact = replace(reading(by, metric=metric), base=(1.0,) * 3, candidate=(by,) * 3)
        assert verdict(Decision(suite(exact), GPU))[0] is status


def test_what_only_one_side_sends_is_known_too() -> None:
    for base, candidate, status in ((0.0, 8.0, Status.FAIL), (8.0, 0.0, Status.PASS)):
        exact = replace(reading(metric="buffers_bytes"), base=(base,) * 3, candidate=(candidate,) * 3)
        decision = Decision(suite(exact), GPU)
        assert verdict(decision)[0] is status
        assert math.isfinite(row(decision, metric="buffers_bytes").ratio)


@pytest.mark.parametrize(
    ("control", "by", "words"),
    [
        (
            "negative",
            1.03,
            "the negative control failed: a copy of memory was found worse, at 1.030 times",
        ),
        ("negative", 0.97, "the negative control failed: a copy of memory was found better"),
        (
            "positive",
            1.0,
            "the positive control failed: a deliberately slowed step was found unchanged, at 1.000 times",
        ),
    ],
)
def test_a_failed_control_is_no_verdict(control: Control, by: float, words: str) -> None:
    failed = [
        each if each.control != control else replace(each, candidate=tuple(by * v for v in QUIET))
        for each in suite()
    ]
    status, (reason,) = verdict(Decision(failed, GPU))
    assert status is Status.NO_VERDICT
    assert words in reason


@pytest.mark.parametrize(
    ("control", "expected"), [("negative", Status.NO_VERDICT), ("positive", Status.FAIL)]
)
def test_failed_positive_control_hides_no_worse_test(control: Control, expected: Status) -> None:
    """A comparison that misses a delay does not invent slower tests."""
    by = {"negative": 1.03, "positive": 1.0}[control]
    failed = [
        replace(each, candidate=tuple(by * v for v in QUIET)) if each.control == control else each
        for each in suite(reading(1.03))
    ]
    decision = Decision(failed, GPU)
    decision.look([reading(1.03, base=FRESH)])
    assert verdict(decision)[0] is expected


def test_noisy_positive_control_has_the_usual_noise() -> None:
    noise = (0.975, 1.025, 1.0)
    control = reading(1.05, "positive control", base=noise, control="positive", gated=False)
    quiet = [reading(test=f"quiet{number}", base=(1.0, 1.001 + number / 1e4, 0.999)) for number in range(4)]
    decision = Decision([*quiet, control, reading(1.05, base=noise)], GPU)
    assert row(decision, "positive control").finding is Finding.SUSPECT
    assert row(decision, "t").finding is Finding.UNDECIDED, "a test as noisy keeps its own noise"


def test_noisy_negative_control_is_no_verdict() -> None:
    def judged(*candidate: float) -> tuple[Status, tuple[str, ...]]:
        noisy = [
            replace(each, candidate=candidate) if each.control == "negative" else each for each in suite()
        ]
        return verdict(Decision(noisy, GPU))

    assert judged(0.995, 1.0, 1.006)[0] is Status.PASS
    status, (reason,) = judged(0.9, 1.0, 1.12)
    assert status is Status.NO_VERDICT
    assert reason.startswith("the negative control is too noisy: 0.8")


@pytest.mark.parametrize(("upper", "noisy"), [(1.16, False), (1.17, True)])
def test_negative_controls_noise_is_a_fraction(upper: float, noisy: bool) -> None:
    """The tolerance on CPUs is exp(0.15) - 1, which is 16.2%. The logarithm of 1.17 is 0.157."""
    control = row(Decision(suite(), read_decision({})["cpu"]), "negative control")
    assert control.tolerance == pytest.approx(0.1618, abs=1e-4)
    wide = replace(control, ratio=0.99, low=0.99 / upper, high=0.99 * upper)
    _, problems = control_problems([wide], positive_needed=False)
    assert bool(problems) == noisy


def test_failed_control_ranks_between_failure_and_regression() -> None:
    failed = [
        replace(each, candidate=(1.03,) * 3) if each.control == "negative" else each
        for each in suite(reading(1.1))
    ]
    decision = Decision(failed, GPU)
    decision.look([reading(1.1, base=FRESH)])
    status, reasons = verdict(decision)
    assert status is Status.NO_VERDICT
    assert reasons[0].startswith("the negative control failed: ")
    assert reasons[1].startswith("t is worse: ")
    answer = ab_answer(decision.rows, {})
    assert answer.unfit[0].startswith("t is worse: "), "nor may a later run be compared with such a one"
    outcomes = {"t": Outcome(kind=OutcomeKind.FAILED, reason="rank 1 died")}
    assert decide(outcomes, measured=outcomes, answer=answer).status is Status.FAIL


def test_base_failure_is_no_verdict() -> None:
    outcomes = {"t": Outcome(kind=OutcomeKind.BASE_FAILED, reason="the base's rank 0 of set A2 died")}
    found = decide(outcomes, measured={"t"}, answer=None)
    assert found.status is Status.NO_VERDICT
    assert found.reasons == ("t was not measured: the base's rank 0 of set A2 died",)


def test_suspect_stays_gated_in_another_noise_class() -> None:
    slower = reading(1.5, metric="cpu_seconds", primary=True)
    decision = Decision(
        suite(*(reading(1, f"c{n}", "cpu_seconds", primary=True) for n in range(6)), slower), GPU
    )
    assert decision.open_tests() == ["t"]
    decision.look([reading(1.5, metric="cpu_seconds", base=FRESH, gated=False, primary=False)])
    found = row(decision, metric="cpu_seconds")
    assert (found.finding, found.gated, found.primary) == (Finding.WORSE, True, True)


def test_gated_metric_without_candidate_is_missing() -> None:
    sample = {"torch": "2.11", "seconds": ((0.1,), (0.1,)), "counters": {}}
    sets = [("A1", "A"), ("A2", "A"), ("B3", "B"), ("B4", "B")]
    samples = tuple(Sample(set=name, side=side, **sample) for name, side in sets)  # type: ignore[arg-type]
    measured = Measured(spec=STEP, iterations=1, samples=samples)
    metrics = {"peak_memory_bytes": {"by_set": {"A1": 1e9, "A2": 1e9}}}
    decision = Decision(estimates_of("t", measured, metrics, "cuda"), GPU)
    assert decision.missing == {
        "t": "has peak_memory_bytes of 2 base and 0 candidate process sets; "
        "both need the same number, at least 2"
    }


def test_a_control_that_is_missing_is_no_verdict() -> None:
    status, reasons = verdict(Decision([each for each in suite() if each.control is None], GPU))
    assert status is Status.NO_VERDICT
    assert reasons == ("the negative control was not measured", "the positive control was not measured")


def test_many_noisy_tests_are_no_verdict_with_advice() -> None:
    orders = ((1.0, 1.02, 0.98), (0.98, 1.0, 1.02), (1.02, 0.98, 1.0))
    noisy = [
        reading(1, f"noisy{number}", base=base, noise_class="noisy") for number, base in enumerate(orders)
    ]
    decision = Decision(suite(*noisy), GPU)
    status, (reason,) = verdict(decision)
    assert status is Status.NO_VERDICT
    needed = row(decision, "noisy0").sets
    assert needed is not None
    assert needed > GPU.default.confirm_sets
    too_many = "this machine is too noisy for them; repeat the run when it is quieter, or deselect them"
    advice = f"--replicates {needed} would decide them" if needed <= MOST_ADVISED else too_many
    assert reason == f"3 of 11 tests are undecided, such as noisy0; {advice}"
    twice = [
        replace(each, base=each.base * needed, candidate=each.candidate * needed) for each in suite(*noisy)
    ]
    assert verdict(Decision(twice, GPU.with_sets(3 * needed)))[0] is Status.PASS


def test_shared_measurement_counts_once_in_class_noise() -> None:
    """Otherwise one measurement's variance would count as its class's, with too many degrees of freedom."""
    noisy = [reading(1, f"noisy{number}", base=(1.0, 1.02, 0.98), noise_class="noisy") for number in range(3)]
    control = reading(
        1.05, "positive control", base=(1.0, 1.03, 0.97), noise_class="noisy", control="positive", gated=False
    )
    alone, shared = (
        row(Decision([*suite(), *some], GPU), "noisy0") for some in (noisy[:1], [*noisy, control])
    )
    assert shared.high / shared.low == pytest.approx(alone.high / alone.low)
    other = reading(1, "other", base=(1.0, 1.021, 0.98), noise_class="noisy")
    beside = row(Decision([*suite(), noisy[0], other], GPU), "noisy0")
    assert math.log(beside.high / beside.low) < 0.9 * math.log(alone.high / alone.low)


def test_candidate_cannot_counts_as_undecided() -> None:
    decision = Decision(suite(*(reading(test=f"more{number}", base=FRESH[:3]) for number in range(12))), GPU)
    tests = [f"cannot{number}" for number in range(2)]
    one, two = (ab_answer(decision.rows, {}, unmeasured=tests[:number]).undecided for number in (1, 2))
    assert one == [], "1 of 21"
    noisy = reading(1, base=(1.0, 1.02, 0.98), noise_class="noisy")
    undecided = Decision([*suite(*(reading(test=f"more{n}", base=FRESH[:3]) for n in range(11))), noisy], GPU)
    beside = [ab_answer(undecided.rows, {}, unmeasured=tests[:number]).undecided for number in (0, 1)]
    assert beside[0] == [], "1 of 20"
    assert [sentence.split(",")[0] for sentence in beside[1]] == [
        "1 of 21 tests are undecided",
        "1 of 21 tests cannot be measured by the candidate",
    ]
    nineteen = [row for row in decision.rows if row.test != "same0"]
    assert ab_answer(nineteen, {}, unmeasured=tests[:1]).undecided == [], "1 of 20"
    assert two == ["2 of 22 tests cannot be measured by the candidate, such as cannot0; deselect them"]
    controls = [row for row in decision.rows if row.control is not None]
    assert ab_answer(controls, {}, unmeasured=tests).undecided == [
        "no test has a metric that can be judged",
        "2 of 2 tests cannot be measured by the candidate, such as cannot0; deselect them",
    ]


def test_advice_when_no_number_of_sets_is_enough() -> None:
    """Also where another test could do with fewer."""
    wild, noisy = (
        reading(1, name, base=base, noise_class=name)
        for name, base in (("wild", (1.0, 1.5, 0.6)), ("noisy", (1.0, 1.01, 0.99)))
    )
    decision = Decision(suite(wild, noisy), GPU)
    assert (row(decision, "wild").sets, row(decision, "noisy").sets) == (
        None,
        row(decision, "noisy").sets or -1,
    )
    _, (reason,) = verdict(decision)
    assert reason == (
        "2 of 10 tests are undecided, such as wild; this machine is too noisy for them; repeat the run when "
        "it is quieter, or deselect them"
    )


def test_shared_base_alone_counts_twice() -> None:
    bases = (1.0, 1.02, 0.98)
    one = reading(1, "one", base=bases, noise_class="noisy")
    other = replace(one, test="other", candidate=(1.0, 0.981, 1.02))
    alone, beside = (row(Decision([*suite(), *some], GPU), "one") for some in ([one], [one, other]))
    assert math.log(beside.high / beside.low) < 0.9 * math.log(alone.high / alone.low)


def test_undecided_row_needs_more_sets() -> None:
    """Though they would do for a change of the tolerance: this one lies between margin and tolerance."""
    noisy = [(0.996, 1.004, 1.0), (1.0, 0.9961, 1.004), (1.004, 1.0, 0.9962)]
    others = [
        reading(1, f"like{number}", base=base, noise_class="noisy") for number, base in enumerate(noisy * 2)
    ]
    found = row(Decision(suite(*others, reading(1.013, base=(1.0, 1.004, 0.996), noise_class="noisy")), GPU))
    assert found.finding is Finding.UNDECIDED
    assert found.detectable < found.tolerance
    assert found.sets == 4


@pytest.mark.parametrize(
    ("base", "candidate", "words"),
    [
        (QUIET, QUIET[:2], "time of 3 base and 2 candidate process sets; both need the same number"),
        (QUIET[:1], QUIET[:1], "time of 1 base and 1 candidate process sets"),
        (QUIET, (1.0, math.nan, 1.0), "a time that is no positive number"),
        (QUIET, (1.0, 0.0, 1.0), "a time that is no positive number"),
        (QUIET, (1.0, math.inf, 1.0), "a time that is no positive number"),
    ],
)
def test_incomplete_estimates_are_no_verdict(
    base: tuple[float, ...], candidate: tuple[float, ...], words: str
) -> None:
    decision = Decision(suite(replace(reading(), base=base, candidate=candidate)), GPU)
    status, (reason,) = verdict(decision)
    assert status is Status.NO_VERDICT
    assert reason.startswith("t has ")
    assert words in reason


def test_nothing_measured_is_never_a_pass() -> None:
    assert ab_answer((), {}).undecided[-1] == "no test has a metric that can be judged"


def test_a_problem_of_the_run_is_no_verdict() -> None:
    assert verdict(Decision(suite(), GPU), "the run ended early") == (
        Status.NO_VERDICT,
        ("the run ended early",),
    )


values = st.lists(st.floats(0.5, 2), min_size=3, max_size=3).map(tuple)


@BOUNDED
@given(values, values, st.sampled_from(["time", "speedup"]), st.floats(1e-3, 1e3))
def test_swapped_sides_and_units_only_turn_the_direction(
    base: tuple[float, ...], candidate: tuple[float, ...], metric: str, unit: float
) -> None:
    def of(one: tuple[float, ...], other: tuple[float, ...]) -> Row:
        return row(
            Decision(suite(replace(reading(metric=metric), base=one, candidate=other)), GPU), metric=metric
        )

    found, swapped = of(base, candidate), of(candidate, base)
    assert swapped.ratio == pytest.approx(1 / found.ratio)
    assert (swapped.low, swapped.high) == pytest.approx((1 / found.high, 1 / found.low))
    assert swapped.detectable == pytest.approx(found.detectable)
    scaled = of(tuple(unit * value for value in base), tuple(unit * value for value in candidate))
    assert (scaled.ratio, scaled.low, scaled.high) == pytest.approx((found.ratio, found.low, found.high))
    assert scaled.finding is found.finding


# --- from measurements to readings


def measured(
    spec: Spec, *, sides: tuple[str, ...] = ("A", "B"), bound: float = 1.0, **fields: Any
) -> Measured:
    """Two sets per side, with two rounds of one second and one of three, of launch-bound steps."""
    samples = tuple(
        Sample(
            set=f"{side}{number}",
            side=side,
            torch="2",
            seconds=((1.0, 1.0), (1.0, 1.0), (3.0, 3.0)),
            counters={"device_seconds": (1 / bound,) * 2},
        )
        for number in (1, 2)
        for side in sides
    )
    return Measured(spec=spec, iterations=1, samples=samples, **fields)


def by_set(value: float) -> dict[str, object]:
    return {"value": value, "unit": "1", "by_set": dict.fromkeys(("A1", "B1", "A2", "B2"), value)}


def test_time_is_primary_and_other_metrics_gate_too() -> None:
    metrics = {
        name: by_set(2)
        for name in ("speedup", "efficiency", "images_per_second", "peak_memory_bytes", "loading_fraction")
    }
    readings = {each.metric: each for each in estimates_of("t", measured(STEP), metrics, "cuda")}
    assert set(readings) == {
        "time",
        "tail_seconds",
        "speedup",
        "efficiency",
        "images_per_second",
        "peak_memory_bytes",
    }
    assert [name for name, each in readings.items() if each.gated] == [
        "time",
        "tail_seconds",
        "speedup",
        "peak_memory_bytes",
    ]
    assert [name for name, each in readings.items() if each.primary] == ["time"]
    assert readings["time"].base == (1.0, 1.0)
    assert readings["tail_seconds"].candidate == pytest.approx((2.6, 2.6))  # a stall that no median sees


def test_launch_bound_step_is_gated_by_cpu_seconds() -> None:
    metrics = {"cpu_seconds": by_set(0.5), "speedup": by_set(2)}
    readings = estimates_of("t", measured(STEP, bound=2), metrics, "cuda")
    assert [each.metric for each in readings if each.gated] == ["cpu_seconds"]
    assert [each.metric for each in readings if each.primary] == ["cpu_seconds"]
    captured = replace(STEP, execution="graph")
    for each in (measured(captured, bound=2), measured(STEP, bound=2, candidate_spec=captured)):
        readings = estimates_of("t", each, metrics, "cuda")
        assert [each.metric for each in readings if each.primary] == ["time"]


def test_launch_bound_step_is_gated_without_a_stored_metric() -> None:
    counted = measured(STEP, bound=2)
    counted = replace(
        counted,
        samples=tuple(
            replace(each, counters={**each.counters, "cpu_seconds": (0.5, 0.4)}) for each in counted.samples
        ),
    )
    (primary,) = [each for each in estimates_of("t", counted, {}, "cuda") if each.primary]
    assert (primary.metric, primary.base, primary.gated) == ("cpu_seconds", (0.5, 0.5), True)
    decision = Decision(estimates_of("t", measured(STEP, bound=2), {}, "cuda"), GPU)
    assert decision.missing == {
        "t": "has cpu_seconds of 0 base and 0 candidate process sets; both need the same number, at least 2"
    }, "never a pass"


def test_peak_memory_is_judged_without_a_stored_metric() -> None:
    """A confirmation may end before the test stores its metrics."""
    counted = measured(STEP)
    samples = tuple(replace(each, counters={"peak_memory_bytes": (3.0, 4.0)}) for each in counted.samples)
    readings = estimates_of("t", replace(counted, samples=samples), {}, "cuda")
    (peak,) = [each for each in readings if each.metric == "peak_memory_bytes"]
    assert (peak.base, peak.gated) == ((4.0, 4.0), True)


@pytest.mark.parametrize(("device", "classes"), [("cpu", 2), ("cuda", 4)])
def test_cpu_noise_is_that_of_training_or_of_calls(device: str, classes: int) -> None:
    specs: list[Spec] = [
        STEP,
        EpochSpec(world_size=2, per_rank_batch_size=8, strategy="ddp"),
        AllReduceSpec(world_size=2, nbytes=2**24),
        CollectiveSpec(world_size=2, nbytes=2**24, kind="broadcast"),
    ]
    estimates = [estimates_of("t", measured(spec), {}, device)[0] for spec in specs]
    assert len({each.noise_class for each in estimates}) == classes
    assert estimates[0].noise_class != estimates[2].noise_class


def test_small_all_reduce_on_gpus_is_not_gated() -> None:
    for nbytes, device, gated in ((2**20, "cuda", False), (2**24, "cuda", True)):
        readings = estimates_of("t", measured(AllReduceSpec(world_size=2, nbytes=nbytes)), {}, device)
        assert [each.gated for each in readings if each.primary] == [gated]


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        (AllReduceSpec(world_size=2, nbytes=2**20), "cpu"),
        (SamplerSpec(world_size=2, epoch_images=1024), "cpu"),
        (AllReduceSpec(world_size=2, nbytes=2**20), "cuda"),
    ],
)
def test_informational_work_cannot_fail(spec: Spec, device: str) -> None:
    """Its time is shown, and it stands for its test, but even 9 times as long it is no regression."""
    slow = [
        replace(each, candidate=tuple(9 * value for value in each.base))
        for each in estimates_of("t", measured(spec), {}, device)
    ]
    decision = Decision(slow, GPU)
    assert row(decision).primary
    assert (decision.open_tests(), verdict(decision)[0]) == ([], Status.NO_VERDICT)
    assert ab_answer(decision.rows, {}).worse == {}


def test_exact_metric_of_informational_work_can_fail() -> None:
    """Bytes depend on the code alone."""
    readings = estimates_of(
        "t", measured(AllReduceSpec(world_size=2, nbytes=2**20)), {"gradients_bytes": by_set(8)}, "cpu"
    )
    assert [each.metric for each in readings if each.gated] == ["gradients_bytes"]


def test_one_side_alone_has_nothing_to_compare() -> None:
    assert estimates_of("t", measured(STEP, sides=("A",)), {}, "cuda") == []


def test_settings_with_other_sets_keep_all_else() -> None:
    more = GPU.with_sets(8)
    assert (more.default.screen_sets, more.default.confirm_sets) == (8, 8)
    assert (GPU.with_sets(2).default.screen_sets, GPU.with_sets(2).default.confirm_sets) == (2, 6)
    assert {name: own.margin for name, own in more.metrics.items()} == {
        name: own.margin for name, own in GPU.metrics.items()
    }
