"""Energy counters of GPUs, and which differences of them are an energy."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.machine import energy
from ddpperf.machine.energy import Window, gpu_counters, joules_per_step, update_seconds
from tests.fake_nvml import FakeGpu, install, refuses, training
from tests.generated import BOUNDED

PERIOD = 0.02


def window(seconds: float = 1.0, *, busy: float = 1.0, joules: float = 600.0, steps: int = 10) -> Window:
    """A window of two GPUs, of which the second one uses half of the energy."""
    return Window(
        began=100.0,
        before=(5.0, 7.0),
        ended=100.0 + seconds,
        after=(5.0 + joules, 7.0 + joules / 2),
        busy_seconds=busy * seconds,
        steps=steps,
    )


# --- from counters to joules


def test_windows_are_added_for_each_gpu() -> None:
    found = joules_per_step([window(), window(joules=300.0, steps=20)], PERIOD)
    assert found == pytest.approx((900 / 30, 450 / 30))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (window(energy.LEAST_UPDATES * PERIOD * 0.99), "too few updates of the counter"),
        (window(busy=energy.FULL * 0.99), "too much waiting"),
        (Window(began=0.0, before=None, ended=9.0, after=(1.0,), busy_seconds=9.0, steps=1), "no counter"),
        (Window(began=0.0, before=(1.0,), ended=9.0, after=None, busy_seconds=9.0, steps=1), "no answer"),
    ],
)
def test_bad_window_gives_no_energy(other: Window, why: str) -> None:
    assert joules_per_step([window(), other], PERIOD) == (), why


def test_counter_that_never_moves_gives_no_energy() -> None:
    assert joules_per_step([window(1e6)], math.inf) == ()


@BOUNDED
@given(st.floats(0.001, 0.1), st.floats(0, 1), st.floats(1, 30))
def test_coarse_counter_errs_by_a_twentieth(period: float, phase: float, lasted: float) -> None:
    def counted(when: float) -> tuple[float, ...]:
        return (500.0 * period * math.floor(when / period + phase),)

    before, after = counted(0.0), counted(lasted)
    of_rounds = Window(began=0.0, before=before, ended=lasted, after=after, busy_seconds=lasted, steps=1)
    for joules in joules_per_step([of_rounds], period):
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
    assert update_seconds(lambda: math.floor(clock.now / 0.02)) == pytest.approx(0.02, abs=1.5e-3)


def test_gpus_are_read_in_joules(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    fakes = [
        training(index, TotalEnergyConsumption=lambda index=index: int(clock.now * 1e6) + index)
        for index in (0, 1)
    ]
    install(monkeypatch, fakes)
    counters = gpu_counters(fakes)
    assert counters is not None
    clock.now = 2.0
    assert counters.read() == (2000.0, 2000.001)
    assert counters.update_seconds == pytest.approx(1e-3)


@pytest.mark.parametrize(
    "gpus",
    [[], [training(), training(1, TotalEnergyConsumption=refuses())], [None]],
    ids=["no GPU", "one refuses", "unknown GPU"],
)
def test_gpu_without_counter_has_no_energy(monkeypatch: pytest.MonkeyPatch, gpus: list[FakeGpu]) -> None:
    install(monkeypatch, [gpu for gpu in gpus if gpu is not None])
    assert gpu_counters(gpus) is None
