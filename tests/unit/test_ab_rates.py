"""How often an A/B run errs, simulated from its estimates to its findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from ddpperf.verdict.ab import Decision
from ddpperf.verdict.estimates import MetricEstimates
from ddpperf.verdict.settings import DecisionSettings, read_decision
from ddpperf.verdict.two_stage_test import LOOKS, UNCHANGED_P, Finding, Noise, class_noise

SETTINGS = read_decision({})
KINDS = (1, 2, 3, 6, 12)  # tests of each
METRICS = ("time", "tail_seconds", "speedup", "peak_memory_bytes")
SUITES = 200


def readings(
    rng: np.random.Generator, sets: int, sigma: float, tests: list[str], heavy: bool
) -> list[MetricEstimates]:
    """Estimates of equal sides, whose sets differ by about sigma; `heavy`: one in ten is 5 sigma slower."""

    def values() -> tuple[float, ...]:
        slow = 5 * spread * (rng.random(sets) < 0.1) if heavy else np.zeros(sets)
        return tuple(np.exp(rng.normal(0, spread, sets) + slow))

    made = []
    for test in tests:
        kind = int(test.split()[0])
        spread = sigma * 2.0 ** (kind % 3 - 1)
        made += [
            MetricEstimates(
                test=test,
                metric=name,
                base=values(),
                candidate=values(),
                noise_class=kind,
                gated=True,
                primary=name == "time",
            )
            for name in METRICS
        ]
    return made


def called_worse(rng: np.random.Generator, settings: DecisionSettings, sigma: float, *, heavy: bool) -> bool:
    tests = [f"{kind} {number}" for kind, size in enumerate(KINDS) for number in range(size)]
    decision = Decision(readings(rng, settings.default.screen_sets, sigma, tests, heavy), settings)
    for _ in range(LOOKS):
        if still := decision.open_tests():
            decision.look(readings(rng, settings.default.confirm_sets, sigma, still, heavy))
    return any(row.finding is Finding.WORSE for row in decision.rows)


@pytest.mark.parametrize("hardware", ["gpu", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sigma", "heavy", "suites"),
    [
        (0.03, False, 20),
        *(pytest.param(sigma, False, SUITES, marks=pytest.mark.slow) for sigma in (0.003, 0.03, 0.1)),
        pytest.param(0.03, True, SUITES, marks=pytest.mark.slow),
    ],
)
def test_equal_sides_are_not_called_worse(hardware: str, sigma: float, heavy: bool, suites: int) -> None:
    """Without a margin, no more runs fail than a rate of `suite_alpha` explains."""
    rng, settings = np.random.default_rng(13), SETTINGS[hardware]
    nothing_tolerated = replace(settings, default=replace(settings.default, margin=0.0), metrics={})
    wrong = sum(called_worse(rng, nothing_tolerated, sigma, heavy=heavy) for _ in range(suites))
    assert binom.sf(wrong - 1, suites, settings.default.suite_alpha) > 1e-3, wrong


@pytest.mark.parametrize("hardware", ["gpu", "cpu"])
@pytest.mark.parametrize("of_tolerance", [0.5, 1.0, 2.0])
def test_a_change_of_the_tolerance_is_rarely_called_unchanged(hardware: str, of_tolerance: float) -> None:
    """In each of up to three measurements, two one-sided tests err with 2.5% probability.

    `of_tolerance` is the noise between process sets, as a multiple of the tolerance.
    """
    settings = SETTINGS[hardware].default
    rng, decided = np.random.default_rng(17), replace(SETTINGS[hardware], metrics={})

    def slowed(sets: int, tests: list[str]) -> list[MetricEstimates]:
        sigma, slower = of_tolerance * settings.tolerance, np.exp(settings.tolerance)
        return [
            MetricEstimates(
                test=test,
                metric="time",
                base=tuple(np.exp(rng.normal(0, sigma, sets))),
                candidate=tuple(slower * np.exp(rng.normal(0, sigma, sets))),
                noise_class="step",
                gated=True,
                primary=True,
            )
            for test in tests
        ]

    unchanged, suites, tests = 0, 40, [f"t{number}" for number in range(10)]
    for _ in range(suites):
        decision = Decision(slowed(settings.screen_sets, tests), decided)
        for _ in range(LOOKS):
            if still := decision.open_tests():
                decision.look(slowed(settings.confirm_sets, still))
        unchanged += sum(row.finding is Finding.UNCHANGED for row in decision.rows)
    assert binom.sf(unchanged - 1, suites * len(tests), (LOOKS + 1) * UNCHANGED_P) > 1e-3, unchanged


@pytest.mark.slow
def test_class_variance_alone_is_overconfident(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own variance of a test counts, too: what differs from its kind is noisier than that says."""
    monkeypatch.setattr("ddpperf.verdict.two_stage_test.OUTLIER_P", 0.0)

    def certain(*arguments: Any) -> Noise:
        usual = class_noise(*arguments)
        return Noise(usual.variance, np.full(len(usual.variance), 1e6))

    monkeypatch.setattr("ddpperf.verdict.ab.class_noise", certain)
    settings = replace(SETTINGS["gpu"], default=replace(SETTINGS["gpu"].default, margin=0.0), metrics={})
    rng = np.random.default_rng(13)
    wrong = sum(called_worse(rng, settings, 0.03, heavy=True) for _ in range(SUITES))
    assert binom.sf(wrong - 1, SUITES, settings.default.suite_alpha) < 1e-3, wrong


@pytest.mark.parametrize(
    ("sigma", "suites"),
    [(0.03, 10), *(pytest.param(sigma, SUITES, marks=pytest.mark.slow) for sigma in (0.003, 0.03))],
)
def test_a_faster_single_device_is_not_called_worse(sigma: float, suites: int) -> None:
    """Every speedup is less, and no step is slower: none of 24 may be taken for slower by chance."""
    rng, settings = np.random.default_rng(13), SETTINGS["gpu"]

    def look(sets: int) -> list[MetricEstimates]:
        made = []
        for test in map(str, range(24)):
            one, before, after = (np.exp(rng.normal(0, sigma, sets)) for _ in range(3))
            faster = 0.8 * np.exp(rng.normal(0, sigma, sets))
            for name, base, candidate in (("time", before, after), ("speedup", one / before, faster / after)):
                made.append(
                    MetricEstimates(
                        test=test,
                        metric=name,
                        base=tuple(base),
                        candidate=tuple(candidate),
                        noise_class=name,
                        gated=True,
                        primary=name == "time",
                    )
                )
        return made

    wrong = 0
    for _ in range(suites):
        decision = Decision(look(settings.default.screen_sets), settings)
        for _ in range(LOOKS):
            still = decision.open_tests()
            decision.look([each for each in look(settings.default.confirm_sets) if each.test in still])
        wrong += any(row.finding is Finding.WORSE for row in decision.rows)
    assert binom.sf(wrong - 1, suites, settings.default.suite_alpha) > 1e-3, wrong
