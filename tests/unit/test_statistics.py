"""Drift, spread and the fastest: known points, bounds, and how often noise alone is a finding."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from scipy.stats import kendalltau, theilslopes

from ddpperf.analysis.statistics import drift, fastest, mean_interval, spread_over_ranks, welch_interval
from tests.project import REPOSITORY

Noise = Callable[[np.random.Generator, int], "np.ndarray[tuple[int], np.dtype[np.float64]]"]

NOISES: dict[str, Noise] = {
    "normal": lambda generator, rounds: 1 + 0.05 * generator.standard_normal(rounds).clip(-9, 9),
    "heavy-tailed": lambda generator, rounds: np.exp(0.05 * generator.standard_t(2, rounds).clip(-99, 99)),
    "stalls": lambda generator, rounds: (
        1 + 0.001 * generator.random(rounds) + 3 * (generator.random(rounds) < 0.1)
    ),
}


def share_drifting(noise: Noise, rounds: int, trend: float, tries: int) -> float:
    """The fraction of seeded runs that drift, if their last round is slower by `trend`."""
    generator = np.random.default_rng(20)
    steady = 1 + trend * np.linspace(0, 1, rounds)
    return sum(drift(list(steady * noise(generator, rounds))) is not None for _ in range(tries)) / tries


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
    ],
)
def test_too_few_rounds_have_no_drift(rounds: list[float]) -> None:
    assert drift(rounds) is None


def test_seven_rounds_drift_only_if_sorted() -> None:
    """So 2 of 5040 of whatever distribution are false alarms, if rounds are independent and alike."""
    drifting = [order for order in permutations(range(1, 8)) if drift(order) is not None]
    assert drifting == [(1, 2, 3, 4, 5, 6, 7), (7, 6, 5, 4, 3, 2, 1)]


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


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("rounds", [10, 40])
def test_noise_alone_hardly_ever_drifts(noise: str, rounds: int) -> None:
    """At most 1 in 1000, of 2000 tries: with 60 tests a run, a false alarm in at most one run of 17."""
    assert share_drifting(NOISES[noise], rounds, 0.0, 2000) <= 0.0025


@pytest.mark.parametrize(
    ("rounds", "trend", "noise", "least", "most"),
    [
        (10, 0.05, 0.001, 1.0, 1.0),  # a GPU-bound step
        (10, 0.10, 0.01, 0.9, 1.0),
        (20, 0.05, 0.01, 0.9, 1.0),
        (7, 0.05, 0.01, 0.0, 0.15),
        (40, 0.01, 0.001, 0.0, 0.0),  # certain, and too small to matter
    ],
)
def test_power_of_the_drift_test(rounds: int, trend: float, noise: float, least: float, most: float) -> None:
    share = share_drifting(
        lambda generator, count: 1 + noise * generator.standard_normal(count), rounds, trend, 300
    )
    assert least <= share <= most


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


def winners(names: int, sets: int, spread: float, faster: float, runs: int = 2000) -> Counter[str]:
    """Count the runs in which a single name may be the fastest, by name.

    Log seconds of `names` names in `sets` process sets differ by the usual `spread`. The name "0" is
    faster than all others by `faster`.
    """
    logs = np.random.default_rng(48).normal(0, spread, (runs, names, sets))
    logs[:, 0] -= math.log1p(faster)
    found = [
        fastest({str(name): seconds.tolist() for name, seconds in enumerate(run)}, spread)
        for run in np.exp(logs)
    ]
    return Counter(names[0] for names in found if len(names) == 1)


GPU_CALLS, CPU_CALLS = 0.0035, 0.2  # usual spreads


@pytest.mark.parametrize(
    ("names", "sets", "spread"), [(3, 1, GPU_CALLS), (4, 1, CPU_CALLS), (4, 3, CPU_CALLS)]
)
def test_equal_algorithms_hardly_ever_have_a_winner(names: int, sets: int, spread: float) -> None:
    assert winners(names, sets, spread, faster=0.0).total() < 0.05 * 2000


@pytest.mark.parametrize(("names", "sets"), [(2, 1), (3, 1), (3, 3), (5, 6)])
def test_winner_by_three_percent_is_found_on_gpus(names: int, sets: int) -> None:
    assert winners(names, sets, GPU_CALLS, faster=0.03)["0"] > 0.95 * 2000


@pytest.mark.parametrize("sets", [1, 2])
def test_slower_of_two_wins_once_in_twenty_runs(sets: int) -> None:
    """The faster one is faster by too little to see: at most 5% of 2,000 runs, and two standard errors."""
    assert winners(2, sets, CPU_CALLS, faster=0.001)["1"] < 0.06 * 2000


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
