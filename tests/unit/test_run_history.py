"""The limits learned from earlier runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, t

from ddpperf.verdict.run_history import Spread, bounds, spread
from ddpperf.verdict.settings import read_decision
from tests.generated import BOUNDED

USUAL = 0.01  # of the simulations in run_history.py
CELLS = 60

logs = st.lists(st.floats(-3, 3), min_size=1, max_size=20)
usuals = st.floats(0.001, 0.5)


class Bounds(NamedTuple):
    suspect: float
    slower: float


def bounds_of(history: Sequence[float], usual: float = USUAL, tests: int = CELLS) -> Bounds:
    return Bounds(*bounds(spread(history, usual), margin=0.005, suite_alpha=0.01, compared=tests))


# --- the spread


@pytest.mark.parametrize(("hardware", "quiet", "noisy"), [("gpu", 0.0035, 0.2), ("cpu", 0.06, 0.2)])
def test_usual_spread_is_configurable(hardware: str, quiet: float, noisy: float) -> None:
    built_in = read_decision({})[hardware]
    assert (built_in.run_spread, built_in.noisy_run_spread) == (quiet, noisy)
    given = read_decision({"decision": {hardware: {"run_spread": 0.1, "noisy_run_spread": 0.1}}})[hardware]
    assert (given.run_spread, given.noisy_run_spread) == (0.1, 0.1)
    assert (given.default, given.metrics) == (built_in.default, built_in.metrics)
    assert given.with_sets(9).run_spread == 0.1


@pytest.mark.parametrize(
    ("history", "deviation", "freedom"),
    [
        ([], 0.01, 10),
        ([5.0], 0.01, 10),
        ([0.0, 0.04], math.sqrt((10 * 1e-4 + 1 * 8e-4) / 11), 11),
        ([0.0, 0.04, 0.0], math.sqrt((10 * 1e-4 + 1.6 * 8e-4) / 11.6), 11.6),
        ([1.0] * 5, math.sqrt(10 * 1e-4 / (10 + 32 / 11)), 10 + 32 / 11),
    ],
)
def test_own_runs_count_beside_the_usual_spread(
    history: list[float], deviation: float, freedom: float
) -> None:
    found = spread(history, 0.01)
    assert (found.deviation, found.degrees_of_freedom) == pytest.approx((deviation, freedom))


@pytest.mark.parametrize("runs", [2, 5, 20])
def test_successive_differences_have_the_stated_freedom(runs: int) -> None:
    """A variance with f degrees of freedom has 2 / f of its own square as its variance."""
    own = np.array(
        [(np.diff(each) ** 2).mean() / 2 for each in np.random.default_rng(1).normal(size=(20_000, runs))]
    )
    assert own.mean() == pytest.approx(1, rel=0.05)
    assert 2 / own.var() == pytest.approx(spread([0.0] * runs, 1.0).degrees_of_freedom - 10, rel=0.1)


@BOUNDED
@given(logs, usuals, st.floats(-5, 5), st.floats(1, 10))
def test_wider_history_never_tightens_a_bound(
    history: list[float], usual: float, shift: float, wider: float
) -> None:
    here, there = bounds_of(history, usual), bounds_of([each + shift for each in history], usual)
    assert (there.suspect, there.slower) == pytest.approx((here.suspect, here.slower))
    wide = bounds_of([each * wider for each in history], usual)
    assert wide.suspect >= here.suspect * (1 - 1e-12)
    assert wide.slower >= here.slower * (1 - 1e-12)


@BOUNDED
@given(st.lists(st.floats(0, 1), min_size=1, max_size=19), usuals, st.floats(1, 10))
def test_more_noisy_runs_never_tighten_a_bound(offsets: list[float], usual: float, factor: float) -> None:
    """Noisy: each run is at least 2.5 times what is usual from the one before."""
    history = [0.0]
    for offset in offsets:
        longer = [*history, history[-1] + (2.5 * usual * factor + offset) * (-1) ** len(history)]
        assert bounds_of(longer, usual).suspect >= bounds_of([], usual).suspect
        assert bounds_of(longer, usual).slower >= bounds_of([], usual).slower
        history = longer


@BOUNDED
@given(logs, usuals, st.integers(1, 1000), st.integers(1, 1000))
def test_slower_bound_grows_with_the_tests(history: list[float], usual: float, few: int, more: int) -> None:
    one, many = (bounds_of(history, usual, tests) for tests in sorted((few, few + more)))
    assert 0.005 < one.suspect == many.suspect <= one.slower <= many.slower


def test_the_bounds_are_the_formulas() -> None:
    between = Spread(deviation=0.02, degrees_of_freedom=13.5)
    suspect, slower = bounds(between, margin=0.005, suite_alpha=0.01, compared=60)
    assert suspect == pytest.approx(0.005 + t.isf(0.01, 13.5) * 0.02 * math.sqrt(2))
    assert slower == pytest.approx(0.005 + t.isf(0.01 / 60, 13.5) * 0.02 * math.sqrt(2))


# --- how often that errs, simulated


def suites(
    deviation: float, runs: int, *, number: int = 400, accepted: float = 0.0, now: float = 0.0
) -> tuple[float, int]:
    """Of `number` suites of `CELLS` tests: the share of tests that are suspects or slower; how many
    suites have a slower one.

    The last half of the runs, and this one, have an `accepted` change; this one is slower than
    those by `now`, in logs.
    """
    random = np.random.default_rng([runs, int(deviation * 1e4)])
    history = random.normal(0, deviation, (number, CELLS, runs))
    history[..., runs // 2 :] += accepted
    last = random.normal(accepted + now, deviation, (number, CELLS))
    found = [[bounds_of(each) for each in suite] for suite in history.tolist()]
    change = last - history[..., -1]
    suspect = change > np.array([[each.suspect for each in suite] for suite in found])
    slower = change > np.array([[each.slower for each in suite] for suite in found])
    return float(suspect.mean()), int(slower.any(axis=1).sum())


@pytest.mark.parametrize(("deviation", "runs"), [(0.005, 1), (0.005, 5), (0.01, 1), (0.01, 5), (0.01, 20)])
def test_false_alarms_stay_below_one_percent(deviation: float, runs: int) -> None:
    suspects, failed = suites(deviation, runs)
    assert binomtest(failed, 400).proportion_ci(method="wilson").high < 0.01
    assert suspects < 0.01


@pytest.mark.parametrize("deviation", [0.002, 0.0035])
def test_gpu_runs_of_one_day_raise_no_alarm(deviation: float) -> None:
    """With the built-in spread; 0.2% was measured between runs of one day."""
    usual = read_decision({})["gpu"].run_spread
    changes = np.random.default_rng(3).normal(0, deviation * math.sqrt(2), (400, CELLS))
    failed = int((changes > bounds_of([0.0], usual).slower).any(axis=1).sum())
    assert binomtest(failed, 400).proportion_ci(method="wilson").high < 0.01


def test_history_lowers_false_alarms_of_noisy_runs() -> None:
    """About 12, 5 and 3 in a hundred: what is usual has to be measured before it is trusted."""
    failed = [suites(0.02, runs)[1] / 400 for runs in (1, 5, 20)]
    assert 0.2 > failed[0] > failed[1] > failed[2]
    assert failed[2] < 0.06


@pytest.mark.parametrize("runs", [1, 5, 20])
def test_ten_percent_slower_is_found(runs: int) -> None:
    suspects, failed = suites(0.005, runs, number=50, now=math.log(1.1))
    assert (suspects, failed) == (1, 50)


@pytest.mark.parametrize(("runs", "gain"), [(5, 0.05), (10, 0.1), (20, 0.1)])
def test_lost_gain_makes_suspects(runs: int, gain: float) -> None:
    suspects, _ = suites(0.005, runs, number=50, accepted=math.log(1 - gain), now=math.log(1.1))
    assert suspects > 0.99
