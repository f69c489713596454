"""The part of a stored run in the verdict: limits, suspects, and what is printed."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
from scipy.stats import t

from ddpperf.report.summary import summary_lines
from ddpperf.results.outcomes import Outcome, OutcomeKind, Status
from ddpperf.results.schema_2 import converted
from ddpperf.specs import AllReduceSpec, CallExecution, TrainingSpec
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.run_history import Spread, bounds
from ddpperf.verdict.run_verdict import decide
from ddpperf.verdict.stored_run_comparison import Change, Comparison
from tests import stored
from tests.stored import GPU, QUIET, compared

SPEC = TrainingSpec(world_size=1, per_rank_batch_size=8, strategy="single", execution="graph")
LAUNCHES: dict[str, tuple[float, ...]] = {"device_seconds": (0.05,), "cpu_seconds": (0.004,)}
NOISY = (1.0, 1.1, 1.2, 1.3)
measured = partial(stored.measured, spec=SPEC)
SUITE = {
    f"t{number}": measured(*QUIET, spec=dataclasses.replace(SPEC, per_rank_batch_size=number + 2))
    for number in range(300)
}


def limits(deviation: float, freedom: float = 10, tests: int = 1) -> tuple[float, float]:
    spread = Spread(deviation=deviation, degrees_of_freedom=freedom)
    suspect, slower = bounds(spread, margin=0.005, suite_alpha=0.01, compared=tests)
    return math.exp(suspect), math.exp(slower)


@pytest.mark.parametrize(
    ("then", "now", "usual"),
    [
        (QUIET, QUIET, GPU.run_spread),
        (QUIET, NOISY, GPU.noisy_run_spread),
        (NOISY, QUIET, GPU.noisy_run_spread),
        (QUIET, QUIET[:3], GPU.run_spread),  # by their range
        (QUIET, QUIET[:1], GPU.noisy_run_spread),  # a single round does not tell
    ],
)
def test_quiet_tests_have_narrower_limits(
    then: tuple[float, ...], now: tuple[float, ...], usual: float
) -> None:
    sides = {"t": measured(*now)}, {"t": measured(*then)}
    change = compared(*sides).changes["t"]
    assert (change.suspect_limit, change.limit) == pytest.approx(limits(usual))
    given = compared(*sides, limit=1.5, history=[sides[1]] * 5).changes["t"]
    assert (given.suspect_limit, given.limit) == (None, 1.5), "one limit for all, if one is given"


@pytest.mark.parametrize(
    ("execution", "rounds", "suspected"),
    [
        ("graph", QUIET, GPU.run_spread),
        ("graph", NOISY, GPU.call_spread),
        ("eager", QUIET, GPU.call_spread),
    ],
)
def test_quiet_collectives_in_a_graph_are_suspected_earlier(
    execution: CallExecution, rounds: tuple[float, ...], suspected: float
) -> None:
    """But they are not called slower earlier, because some runs differ more."""
    spec = AllReduceSpec(world_size=2, nbytes=1024, execution=execution)
    run = {"t": measured(*rounds, spec=spec)}
    change = compared(run, run).changes["t"]
    wanted = limits(suspected)[0], limits(GPU.call_spread)[1]
    assert (change.suspect_limit, change.limit) == pytest.approx(wanted)


def test_one_stored_run_of_a_large_gpu_suite_shows_three_percent() -> None:
    """Quiet tests in CUDA graphs are then measured again only if they look slower."""
    assert compared(SUITE, SUITE).to_confirm() == []
    late = {**SUITE, "t7": measured(*(1.03 * t for t in QUIET), spec=SUITE["t7"].spec)}
    comparison = compared(late, SUITE)
    assert (comparison.to_confirm(), comparison.slower) == (["t7"], {})


def test_what_a_comparison_shows_looks_slower_19_times_in_20() -> None:
    run = {"t": measured(*QUIET)}
    change = compared(run, run).changes["t"]
    error = GPU.run_spread * math.sqrt(2)
    assert change.suspect_limit is not None
    missed = t.cdf((math.log(change.suspect_limit) - math.log(change.shown)) / error, 10)
    assert missed == pytest.approx(0.05)
    given = compared(run, run, limit=1.5).changes["t"]
    assert given.shown == 1.5, "one limit for all, if one is given"


def test_without_the_stored_code_the_limits_must_show_the_tolerance() -> None:
    """A suspected test is then not measured again."""
    comparison = compared(SUITE, SUITE)
    assert answer_of(comparison, None).undecided == []
    (blind,) = answer_of(comparison, None, no_stored_code="git is missing").undecided
    assert blind.startswith("300 of 300 tests would not have shown a slow-down as large as their tolerance")


def test_history_moves_the_limits_of_a_test() -> None:
    other = measured(9.0, spec=dataclasses.replace(SPEC, per_rank_batch_size=16))
    runs = [{"t": measured(1.0)}, {"t": other, "u": measured(5.0)}, {"t": measured(math.exp(0.6))}, {}]
    change = compared({"t": measured(1.0)}, {"t": measured(1.0)}, history=runs).changes["t"]
    deviation = math.sqrt((10 * GPU.noisy_run_spread**2 + 0.6**2 / 2) / 11)
    assert (change.suspect_limit, change.limit) == pytest.approx(limits(deviation, 11))


def test_more_tests_widen_the_limit() -> None:
    """What is compared by CPU seconds, or not at all, does not count."""
    bound = dataclasses.replace(
        measured(0.1), samples=(dataclasses.replace(measured(0.1).samples[0], counters=LAUNCHES),)
    )
    bound = dataclasses.replace(bound, spec=dataclasses.replace(SPEC, execution="eager"))
    other = dataclasses.replace(SPEC, per_rank_batch_size=16)
    then = {"t": measured(*QUIET), "u": measured(*QUIET, spec=other), "cpu": bound, "gone": measured(*QUIET)}
    change = compared({name: then[name] for name in ("t", "u", "cpu")}, then).changes["t"]
    suspect, slower = limits(GPU.run_spread, tests=2)
    assert (change.suspect_limit, change.limit) == pytest.approx((suspect, slower))
    assert suspect == pytest.approx(limits(GPU.run_spread)[0])


def test_unconfirmed_suspect_is_no_failure() -> None:
    """Its ratio is within the strict limit, which alone decides without an A/B run."""
    other = dataclasses.replace(SPEC, per_rank_batch_size=16)
    then = {"t": measured(*QUIET), "u": measured(*QUIET, spec=other)}
    between = (limits(GPU.run_spread)[0] + limits(GPU.run_spread, tests=2)[1]) / 2
    suspect = measured(*(between * t for t in QUIET))
    comparison = compared({"t": suspect, "u": then["u"]}, then)
    assert (set(comparison.looks_slower), comparison.slower) == ({"t"}, {})
    outcomes = dict.fromkeys(then, Outcome(kind=OutcomeKind.PASSED))
    verdict = decide(outcomes, measured=outcomes, answer=answer_of(comparison, None, no_stored_code="no git"))
    assert verdict.status is Status.PASS
    slower = compared({"t": measured(*(1.2 * t for t in QUIET)), "u": then["u"]}, then)
    assert (slower.looks_slower, set(slower.slower)) == (slower.slower, {"t"})


# --- what is said


def told(comparison: Comparison) -> list[str]:
    stored = {**measured(*QUIET).to_json(), "references": {}, "notes": [], "metrics": {}}
    header = {
        "hardware_key": "h200x4",
        "environment": {"commit": "nogit"},
        "options": {"rounds": 4},
        "outcomes": {test: {"kind": "passed", "reason": ""} for test in comparison.changes},
        "verdict": {"status": "PASS", "reasons": ["good"]},
        "comparison": comparison.to_json(),
        "compared_with": comparison.baseline,
    }
    benchmarks = [{"fullname": test, "extra_info": {"ddpperf": stored}} for test in comparison.changes]
    return summary_lines(converted({"benchmarks": benchmarks, "ddpperf": header}), width=200)


def change(ratio: float, limit: float = 1.2345678) -> Change:
    return Change(then_seconds=1.0, now_seconds=ratio, limit=limit, suspect_limit=1.1)


def test_slower_tests_are_named() -> None:
    ratios = {"a": 1.2, "b": 1.05, "c": 1.24, "d": 1.3, "e": 1.25, "f": 1.26, "g": 1.11}
    changes = {f"x.py::{test}": change(ratio) for test, ratio in ratios.items()}
    lines = told(Comparison(baseline="0001_x.json", changes=changes))
    for ending in (
        "1.110  -         undecided",
        "1.050  -         not worse",
        "4 tests slower than stored, such as d (+30.0%), f (+26.0%), e (+25.0%)",
        "with 0001_x.json: 7 times, the median is 24.0% longer than stored",
    ):
        assert [line for line in lines if line.endswith(ending)]


def test_slow_drift_is_printed() -> None:
    history = [
        {"t": measured(*(t * 1.01**number for t in QUIET)), "u": measured(*QUIET)} for number in range(10)
    ]
    comparison = compared(history[9], history[8], history=history[:9])
    assert comparison.drifts == {"t": pytest.approx(5 * math.log(1.01)), "u": 0}
    (line,) = (line for line in told(comparison) if "slow drift" in line)
    assert line.endswith(
        "from the first 5 baselines to the last 5 runs: 1 test slower, such as t (+5.1%), of 2"
    )
    others = [{"t": stored.measured(*QUIET)}, *history[1:9]]  # the first one measured another spec
    assert compared(history[9], history[8], history=others).drifts == {}
