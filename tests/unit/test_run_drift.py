"""The slow drift of step times over many runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.run_drift import drifts
from tests.generated import BOUNDED

USUAL = 0.01
TESTS = [f"t{number}" for number in range(60)]
Run = tuple[bool, dict[str, float]]


def suite_drifts(nights: Sequence[Sequence[float]], usual: float = USUAL) -> dict[str, float]:
    """The drifts of `TESTS` in the last of some nights, whose first five runs were promoted.

    nights[night][test] are log seconds.
    """
    *history, now = (dict(zip(TESTS, logs, strict=True)) for logs in nights)
    past = [(night < 5, logs) for night, logs in enumerate(history)]
    return drifts(past, now, dict.fromkeys(TESTS, usual), alpha=0.01)


def own_drift(promoted: Sequence[float], later: Sequence[float], usual: float) -> float:
    """The drift of a single test of a suite of 60, after five promoted runs."""
    return suite_drifts([[log] * len(TESTS) for log in (*promoted, *later)], usual)["t0"]


@pytest.mark.parametrize("deviation", [0.002, 0.005, 0.01])
def test_steady_nights_do_not_drift(deviation: float) -> None:
    nights = np.random.default_rng(4).normal(0, deviation, (105, len(TESTS))).tolist()
    for night in range(9, 105):
        assert suite_drifts(nights[: night + 1]) == dict.fromkeys(TESTS, 0.0)


@BOUNDED
@given(st.lists(st.floats(-0.004, 0.004), min_size=10, max_size=10), st.floats(0.06, 1))
def test_six_percent_in_small_steps_is_drift(noise: list[float], change: float) -> None:
    first, last = noise[:5], [change + log for log in noise[5:]]
    assert own_drift(first, last, USUAL) == pytest.approx(change + sum(noise[5:]) / 5 - sum(noise[:5]) / 5)
    assert own_drift(last, first, USUAL) == 0, "a test that got faster does not drift"
    assert own_drift(first, last, 0.2) == 0 or change > 0.4, "runs usually differ by more than that"


@pytest.mark.parametrize(
    ("tests", "change", "drifted"), [(1, 0.021, 0), (1, 0.023, 1), (60, 0.023, 0), (60, 0.032, 60)]
)
def test_limit_grows_with_the_tests(tests: int, change: float, drifted: int) -> None:
    """0.01 + t sqrt(10/18) 0.01 sqrt(2/5), with t = 2.55 for a single test and 4.42 for 60 tests."""
    history = [(True, dict.fromkeys(TESTS[:tests], 0.0))] * 5 + [(False, dict.fromkeys(TESTS, change))] * 4
    found = drifts(history, dict.fromkeys(TESTS[:tests], change), dict.fromkeys(TESTS, USUAL), alpha=0.01)
    assert sum(map(bool, found.values())) == drifted


def test_drift_compares_first_baselines_with_last_runs() -> None:
    """The other runs are 100 times as far away, and change nothing."""

    def runs(*logs: float, promoted: bool) -> list[Run]:
        return [(promoted, {"t": log}) for log in logs]

    def found(history: list[Run]) -> dict[str, float]:
        return drifts(history, {"t": 1.05}, {"t": USUAL}, alpha=0.01)

    begun = [*runs(0.01, 0.02, promoted=True), *runs(100.0, promoted=False)]
    begun += runs(0.03, 0.04, 0.05, promoted=True)
    between: list[Run] = [*runs(-100.0, promoted=True), (True, {"u": 100.0})]
    last = [*runs(1.01, 1.02, promoted=False), *runs(1.03, promoted=True), *runs(1.04, promoted=False)]
    assert found([*begun, *between, *last]) == {"t": pytest.approx(1.0)}
    assert found([*begun, *last]) == {"t": pytest.approx(1.0)}
    assert found([*begun, *last[1:]]) == {}, "four runs follow the fifth baseline"
    assert found(runs(*[1.0] * 20, promoted=False)) == {}, "none was promoted"
