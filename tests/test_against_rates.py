"""How often a whole run errs, simulated from its readings to its verdict: kinds of a few tests, sets with tails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta

from ddpperf.analysis.against import Decision
from ddpperf.analysis.decision import Finding
from ddpperf.analysis.readings import Reading
from ddpperf.analysis.settings import DecisionSettings, read_decision

SETTINGS = read_decision({}, name="built in")
KINDS = (1, 2, 3, 6, 12)  # tests of each
METRICS = ("time", "tail_seconds", "speedup", "peak_memory_bytes")
SUITES = 200


def readings(rng: np.random.Generator, sets: int, sigma: float, tests: list[str], heavy: bool) -> list[Reading]:
    """Of equal sides, whose sets differ by sigma, or half or twice that; where `heavy`, one in ten is 5 sigma slower."""

    def values() -> tuple[float, ...]:
        slow = 5 * spread * (rng.random(sets) < 0.1) if heavy else np.zeros(sets)
        return tuple(np.exp(rng.normal(0, spread, sets) + slow))

    made = []
    for test in tests:
        kind = int(test.split()[0])
        spread = sigma * 2.0 ** (kind % 3 - 1)
        made += [
            Reading(test=test, metric=name, base=values(), candidate=values(), kind=kind, gated=True, primary=name == "time")
            for name in METRICS
        ]
    return made


def called_worse(rng: np.random.Generator, settings: DecisionSettings, sigma: float, *, heavy: bool) -> bool:
    tests = [f"{kind} {number}" for kind, size in enumerate(KINDS) for number in range(size)]
    decision = Decision(readings(rng, settings.default.screen_sets, sigma, tests, heavy), settings)
    if suspects := decision.suspects():
        decision.confirm(readings(rng, settings.default.confirm_sets, sigma, suspects, heavy))
    return any(row.finding is Finding.WORSE for row in decision.rows)


@pytest.mark.parametrize("hardware", ["gpu", "cpu"])
@pytest.mark.parametrize(("sigma", "heavy"), [(0.0, False), (0.003, False), (0.03, False), (0.1, False), (0.03, True)])
def test_equal_sides_are_not_called_worse(hardware: str, sigma: float, heavy: bool) -> None:
    """Upper 95 % bound by Clopper and Pearson: no false alarm in 200 is at most 1.5 %."""
    rng, settings = np.random.default_rng(13), SETTINGS[hardware]
    nothing_tolerated = replace(settings, default=replace(settings.default, margin=0.0), metrics={})
    wrong = sum(called_worse(rng, nothing_tolerated, sigma, heavy=heavy) for _ in range(SUITES))
    assert beta.ppf(0.95, wrong + 1, SUITES - wrong) < 0.02, wrong
    assert wrong <= 1
