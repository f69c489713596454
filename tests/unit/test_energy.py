"""Energy counters of GPUs, and which differences of them are an energy."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.machine import energy
from ddpperf.machine.energy import EnergyCounters, Round, joules_per_step, median_gap
from tests.fake_nvml import FakeGpu, install, refuses, training
from tests.generated import BOUNDED

PERIOD = 0.02


def measured(seconds: float = 1.0, joules: float = 600.0, steps: int = 10, **given: Any) -> Round:
    """A round of two GPUs, of which the second one uses half of the energy."""
    before, after = (5.0, 7.0), (5.0 + joules, 7.0 + joules / 2)
    one = Round(began=100.0, ended=100.0 + seconds, before=before, after=after, steps=steps)
    return replace(one, **given)


# --- from counters to joules


def test_energies_of_spans_are_added_for_each_gpu() -> None:
    found = joules_per_step([[measured()], [measured(joules=300.0, steps=20)]], PERIOD)
    assert found == pytest.approx((900 / 30, 450 / 30))


def test_span_counts_from_its_first_round_to_its_last() -> None:
    """A later round has no count before it."""
    later = measured(began=101.05, ended=102.05, before=(), after=(1005.0, 507.0))
    assert joules_per_step([[measured(), later]], PERIOD) == pytest.approx((1000 / 20, 500 / 20))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ([measured(energy.LEAST_UPDATES * PERIOD * 0.99)], "too few updates of the counter"),
        ([measured(0.4), measured(began=100.6, ended=101.0)], "too much waiting"),
        ([measured(before=())], "no counter"),
        ([measured(after=())], "no answer"),
    ],
)
def test_bad_span_gives_no_energy(other: list[Round], why: str) -> None:
    assert joules_per_step([[measured()], other], PERIOD) == (), why


@BOUNDED
@given(st.floats(0.001, 0.1), st.floats(0, 1), st.floats(1, 30))
def test_coarse_counter_errs_by_a_twentieth(period: float, phase: float, lasted: float) -> None:
    before, after = ((500.0 * period * math.floor(when / period + phase),) for when in (0.0, lasted))
    of_rounds = measured(began=0.0, ended=lasted, before=before, after=after, steps=1)
    for joules in joules_per_step([[of_rounds]], period):
        assert joules == pytest.approx(500.0 * lasted, rel=1.001 / energy.LEAST_UPDATES)


# --- GPUs


class Clock:
    """A clock that moves only when somebody sleeps or asks the counter."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    mine = Clock()
    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=mine.monotonic, sleep=mine.sleep))
    return mine


def test_update_period_is_found(clock: Clock) -> None:
    assert median_gap(lambda: (math.floor(clock.now / 0.02),)) == pytest.approx(0.02, abs=1.5e-3)
    assert median_gap(lambda: (5.0,)) == math.inf


def test_gpus_are_read_in_joules(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    fakes = [
        training(index, TotalEnergyConsumption=lambda index=index: int(clock.now * 1e6) + index)
        for index in (0, 1)
    ]
    install(monkeypatch, fakes)
    counters = EnergyCounters(fakes)
    clock.now = 2.0
    assert counters.joules(2) == (2000.0, 2000.001)
    assert counters.joules(1) == (2000.0,)
    assert counters.update_seconds == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "gpus",
    [[], [training(), training(1, TotalEnergyConsumption=refuses)], [None]],
    ids=["no GPU", "one refuses", "lost GPU"],
)
def test_gpu_without_counter_has_no_energy(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, gpus: list[FakeGpu]
) -> None:
    install(monkeypatch, [gpu for gpu in gpus if gpu is not None])
    assert EnergyCounters(gpus).joules(2) == ()
