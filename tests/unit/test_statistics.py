"""Drift, spread, intervals and the fastest: known points, and what scipy computes."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
from scipy.stats import kendalltau, theilslopes

from ddpperf.analysis.statistics import drift, fastest, mean_interval, spread_over_ranks, welch_interval
from tests.project import REPOSITORY

# --- drift


@pytest.mark.parametrize(
    ("rounds", "change"),
    [
        ([1.0 + 0.01 * index for index in range(10)], 0.09 / 1.045),
        ([2.0 - 0.02 * index for index in range(10)], -0.18 / 1.91),
        ([1.0 + 0.01 * index for index in range(9)] + [50.0], 0.09 / 1.045),  # the last round stalled, too
        ([1.0 + 0.02 * (index // 2) for index in range(10)], 0.09 / 1.04),  # ties, as of a coarse clock
        ([1.0 + 0.01 * index for index in range(40)], 0.39 / 1.195),
    ],
)
def test_steady_trend_is_a_drift(rounds: list[float], change: float) -> None:
    assert drift(rounds) == pytest.approx(change, rel=0.01)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rounds",
    [
        [],
        [1.0],
        [1.0, 2.0],
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],  # one order of 720, and its reverse: p = 0.0028
        [1.0] * 10,
        [1.0] * 9 + [2.0],
        [1.0, 2.0] * 5,
        [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 4.0, 3.0, 2.0, 1.0],
        [1.0 + 0.0004 * index for index in range(40)],  # certain, and too small to matter
    ],
)
def test_unclear_or_small_change_is_no_drift(rounds: list[float]) -> None:
    assert drift(rounds) is None


@pytest.mark.parametrize("rounds", [7, 10, 33])
def test_drift_is_kendalls_tau_and_the_slope_of_theil_and_sen(rounds: int) -> None:
    generator, found = np.random.default_rng(3), set()
    for trend in np.linspace(-0.5, 0.5, 100):
        seconds = list(2.0 + trend * np.linspace(0, 1, rounds) + 0.1 * generator.standard_normal(rounds))
        change = theilslopes(seconds, range(rounds)).slope * (rounds - 1) / np.median(seconds)
        drifts = kendalltau(range(rounds), seconds, method="exact").pvalue < 0.001 and abs(change) >= 0.02
        assert drift(seconds) == (pytest.approx(change) if drifts else None)
        found.add(bool(drifts))
    assert found == {True, False}


def test_collecting_the_experiments_loads_neither_torch_nor_scipy() -> None:
    """Every command would wait for them, and a CUDA context would take memory."""
    tests = [f"perf.{path.stem}" for path in sorted((REPOSITORY / "perf").glob("test_*.py"))]
    assert len(tests) > 5
    script = (
        f"import sys, ddpperf.plugin, {', '.join(tests)}; print(*{{'torch', 'scipy'}} & set(sys.modules))"
    )
    imported = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert imported.stdout.split() == []


# --- the fastest


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ({"a": [1.0], "b": [1.0]}, 1.859548 * 0.1 * 2**0.5),  # t(0.05) for 8 degrees of freedom
        ({"a": [1.0], "b": [1.0], "c": [9.0]}, 2.306004 * 0.1 * 2**0.5),  # t(0.05 / 2)
        ({"a": [0.8, 1.25], "b": [1.0, 1.0]}, 2.919986 * math.log(1.25) * (2 / 2) ** 0.5),  # t for 2 (2 - 1)
    ],
)
def test_names_within_the_limit_may_be_the_fastest(seconds: dict[str, list[float]], limit: float) -> None:
    """The seconds of b are as many times longer as the limit allows, or a little more."""
    for factor, found in ((0.999, ["a", "b"]), (1.001, ["a"])):
        longer = [second * math.exp(factor * limit) for second in seconds["b"]]
        assert fastest(seconds | {"b": longer}, usual=0.1) == found
        assert fastest({"b": longer} | seconds | {"b": longer}, usual=0.1) == found, "in any order"


# --- the spread over ranks


@pytest.mark.parametrize(
    ("rounds", "spread"),
    [
        ([[1.0]], None),
        ([[1.0], [2.0], [3.0]], None),
        ([[1.0, 1.0]] * 3, 0.0),
        ([[1.0, 3.0]], 1.0),
        ([[1.0, 2.0, 5.0, 2.0]] * 4, 2.0),
        ([[1.0, 1.1], [1.0, 1.1], [90.0, 1.1]], 0.1 / 1.05),  # a stalled round makes no rank slow
        ([[1.0, 1.1], [1.1, 1.0], [1.0, 1.1], [1.1, 1.0]], 0.0),  # in turn slow: no rank is
    ],
)
def test_spread_over_ranks_uses_their_medians(rounds: list[list[float]], spread: float | None) -> None:
    assert spread_over_ranks(rounds) == (None if spread is None else pytest.approx(spread))


def test_every_round_has_every_rank() -> None:
    with pytest.raises(ValueError, match="shorter"):
        spread_over_ranks([[1.0, 2.0], [1.0]])


def test_a_means_interval_is_students() -> None:
    half = 4.302653 * 0.1 / 3**0.5
    assert mean_interval([0.5, 0.6, 0.7]) == pytest.approx((0.6 - half, 0.6 + half))
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5)


def test_a_differences_interval_is_welchs() -> None:
    """By hand: variances of a mean 0.0013/3 and 0.00303/3, whose freedom is 3.45."""
    ours, theirs = [0.9, 0.92, 0.97], [0.7, 0.71, 0.8]
    one, other = (np.var(each, ddof=1) / 3 for each in (ours, theirs))
    freedom = (one + other) ** 2 / (one**2 / 2 + other**2 / 2)
    half = 2.9607 * (one + other) ** 0.5
    assert freedom == pytest.approx(3.448, abs=1e-3)
    apart = np.mean(ours) - np.mean(theirs)
    assert welch_interval(ours, theirs) == pytest.approx((apart - half, apart + half), abs=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, high = welch_interval([0.5, 0.5], [0.6, 0.8])
    assert (low, high) == pytest.approx((-0.2 - 12.7062 * 0.1, -0.2 + 12.7062 * 0.1), abs=1e-4), (
        "of the other's spread alone"
    )
    assert welch_interval([0.5, 0.5], [0.75, 0.75]) == (-0.25, -0.25)
