"""The slow drift of step times over many runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.history.past_runs import PastRun, Work
from ddpperf.history.run_drift import drifts, first_and_last
from ddpperf.specs import AllReduceSpec
from tests.generated import BOUNDED

USUAL = 0.01
SPEC = AllReduceSpec(world_size=2, nbytes=1024)
TESTS = [f"t{number}" for number in range(60)]


def run(logs: dict[str, float], *, promoted: bool) -> PastRun:
    return PastRun(
        name="",
        when="",
        commit="",
        environment={},
        promoted=promoted,
        accepted=True,
        options="",
        seconds={(test, SPEC): math.exp(log) for test, log in logs.items()},
    )


def found_drifts(history: Sequence[PastRun], now: dict[str, float], usual: float = USUAL) -> dict[str, float]:
    logs: dict[Work, float] = {(test, SPEC): log for test, log in now.items()}
    return drifts(history, logs, dict.fromkeys(logs, usual), alpha=0.01)


def suite_drifts(nights: Sequence[Sequence[float]], usual: float = USUAL) -> dict[str, float]:
    """The drifts of `TESTS` in the last of some nights, whose first five runs were promoted.

    nights[night][test] are log seconds.
    """
    *history, now = (dict(zip(TESTS, logs, strict=True)) for logs in nights)
    past = [run(logs, promoted=night < 5) for night, logs in enumerate(history)]
    return found_drifts(past, now, usual)


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
    history = [run(dict.fromkeys(TESTS[:tests], 0.0), promoted=True)] * 5
    history += [run(dict.fromkeys(TESTS[:tests], change), promoted=False)] * 4
    found = found_drifts(history, dict.fromkeys(TESTS[:tests], change))
    assert sum(map(bool, found.values())) == drifted


def ends(*runs: str) -> tuple[str, str] | None:
    """The names of the runs that are compared. A run is a letter, which is upper case if it is a baseline."""
    found = first_and_last([(name.isupper(), float(ord(name))) for name in runs])
    return found and tuple("".join(chr(int(value)) for value in group) for group in found)  # type: ignore[return-value]


def test_drift_compares_first_baselines_with_last_runs() -> None:
    assert ends(*"ABxCDEyzFuvwst") == ("ABCDE", "uvwst")
    assert ends(*"ABxCDEyz") == ("ABCD", "Eyz"), "at most half of the runs are first ones"
    assert ends(*"ABCd") == ("AB", "Cd")


def test_drift_is_known_from_the_third_run_on() -> None:
    assert ends(*"Ab") is None
    assert ends(*"Abc") == ("A", "bc")
    assert ends(*"ABc") == ("A", "Bc")
    assert ends(*"abcdef") is None, "none was promoted"
    past = [run({"t": 0.0}, promoted=True), run({"t": 0.1, "u": 1.0}, promoted=False)]
    assert found_drifts(past, {"t": 0.1, "u": 0.0}) == {"t": pytest.approx(0.1)}
