"""How often screening and confirmation err, simulated: identical code fails fewer than 1% of suites."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import beta

from ddpperf.verdict.two_stage_test import (
    CPU,
    GPU,
    LOOKS,
    Array,
    Finding,
    LogEstimates,
    Noise,
    Settings,
    class_noise,
    look,
    moderated_noise,
    screen,
)

FLOOR = 0.0005**2  # a set's median of seven rounds that spread by 0.1 %
METRICS = 4  # of a test, that move together
SUITES = 2000


def suite(
    rng: np.random.Generator,
    sigmas: Array,
    settings: Settings,
    shifts: Array,
    *,
    rounds: int = 1,
    reuse: bool = False,
) -> list[Finding]:
    """What is found of each metric of a suite: sigmas[test] between sets, shifts[test] by which the
    candidate is worse.

    Two mistakes can be made: rounds, of which each set's several are taken for sets; reuse, of the
    screening's sets by the later looks.
    """

    def measured(sets: int) -> LogEstimates:
        return LogEstimates(side(sets, 0 * shifts), side(sets, shifts))

    def side(sets: int, shift: Array) -> Array:
        common, own = rng.normal(size=(len(sigmas), 1, sets)), rng.normal(size=(len(sigmas), METRICS, sets))
        between = np.repeat((0.8 * common + 0.6 * own) * sigmas[:, None, None], rounds, axis=2)
        drawn: Array = between + rng.normal(size=between.shape) * FLOOR**0.5 + shift[:, None, None]
        return drawn.reshape(gated, sets * rounds)

    gated = len(sigmas) * METRICS
    first = measured(settings.screen_sets)
    usual = class_noise(first, ["one"] * gated, FLOOR)
    found = np.array(screen(first, moderated_noise(first, usual, 0.0), settings, gated))
    kinds = {True: found == Finding.SUSPECT, False: found == Finding.UNDECIDED}
    again: list[LogEstimates] = []
    for _ in range(LOOKS):
        again.append(first if reuse else measured(settings.confirm_sets))
        for suspect, members in kinds.items():
            still = members & np.isin(found, [Finding.SUSPECT, Finding.UNDECIDED])
            if still.any():
                every = again if suspect else [first, *again]
                base, candidate = (
                    np.concatenate([getattr(each, name) for each in every], axis=1)[still]
                    for name in ("base", "candidate")
                )
                prior = Noise(usual.variance[still], usual.degrees_of_freedom[still])
                together = LogEstimates(base, candidate)
                noise = moderated_noise(together, prior, 0.0)
                found[still] = look(together, noise, settings, gated, suspect=suspect)
    return list(found)


def measured_sigmas(rng: np.random.Generator, tests: int) -> Array:
    """As on H200s: most sets differ by 0.2 to 0.35 %, those of a few tests by 0.7 %."""
    return np.where(rng.random(tests) < 0.05, 0.007, rng.uniform(0.002, 0.0035, tests))


def bound(count: int, trials: int) -> float:
    """Upper 95 % bound of a rate, by Clopper and Pearson."""
    return float(beta.ppf(0.95, count + 1, trials - count))


@pytest.mark.parametrize(
    ("sigma", "suites"),
    [
        (0.003, 400),
        *(pytest.param(sigma, SUITES, marks=pytest.mark.slow) for sigma in (0.0, 0.003, 0.01, 0.1, None)),
    ],
)
def test_identical_code_is_not_called_worse(sigma: float | None, suites: int) -> None:
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(suites):
        sigmas = measured_sigmas(rng, 60) if sigma is None else np.full(60, sigma)
        wrong += Finding.WORSE in suite(rng, sigmas, GPU, np.zeros(60))
    assert bound(wrong, suites) < 0.01, wrong


def test_identical_code_is_not_worse_on_cpu() -> None:
    rng = np.random.default_rng(8)
    wrong = sum(Finding.WORSE in suite(rng, np.full(12, 0.03), CPU, np.zeros(12)) for _ in range(SUITES))
    assert bound(wrong, SUITES) < 0.01, wrong


def test_each_safeguard_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes such as rounds as sets, reused data or one alpha call identical code worse far more often."""

    def rate(suites: int = 300, **mistakes: Any) -> float:
        rng, sigmas = np.random.default_rng(11), np.full(60, 0.1)  # beside which the margin is nothing
        return float(
            np.mean(
                [Finding.WORSE in suite(rng, sigmas, GPU, np.zeros(60), **mistakes) for _ in range(suites)]
            )
        )

    assert rate(suites=1000) < 0.01
    assert rate(suites=40, rounds=7) > 0.5
    monkeypatch.setattr(Settings, "look_alpha", lambda self, gated, suspect: self.screen_alpha)
    assert rate() > 0.03
    assert rate(suites=40, reuse=True) > 0.5


@pytest.mark.parametrize(
    ("settings", "tests", "shift", "least"),
    [(GPU, 60, 0.02, 0.95), (GPU, 60, 0.03, 0.99), (CPU, 12, 0.15, 0.95), (CPU, 12, 0.25, 0.99)],
)
def test_regressions_are_found(settings: Settings, tests: int, shift: float, least: float) -> None:
    """On a GPU with sets that differ as measured, on a CPU by 3 %; a tenth of the tests got worse, or one."""
    worse = max(1, tests // 10)
    rng, found, shifts = (
        np.random.default_rng(9),
        list[bool](),
        np.where(np.arange(tests) < worse, np.log1p(shift), 0.0),
    )
    for _ in range(60 if settings is GPU else 400):
        sigmas = measured_sigmas(rng, tests) if settings is GPU else np.full(tests, 0.03)
        answers = suite(rng, sigmas, settings, shifts)
        found += [answer == Finding.WORSE for answer in answers[: worse * METRICS]]
        assert Finding.WORSE not in answers[worse * METRICS :], (
            "what did not change is not, whatever else did"
        )
    assert np.mean(found) >= least


def test_most_unchanged_metrics_are_found_unchanged() -> None:
    rng = np.random.default_rng(10)
    answers = [
        answer for _ in range(20) for answer in suite(rng, measured_sigmas(rng, 60), GPU, np.zeros(60))
    ]
    assert np.mean([answer == Finding.UNCHANGED for answer in answers]) > 0.98
