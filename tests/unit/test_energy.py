"""Energy counters of GPUs, and which differences of them are an energy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.machine.utilization import LEAST_SECONDS, Round, joules_now, joules_per_step
from tests.fake_nvml import install, refuses, training
from tests.generated import BOUNDED


def measured(seconds: float = 2.0, joules: float = 600.0, steps: int = 10, **given: Any) -> Round:
    """A round of two GPUs, of which the second one uses half of the energy."""
    before, after = (5.0, 7.0), (5.0 + joules, 7.0 + joules / 2)
    one = Round(began=100.0, ended=100.0 + seconds, before=before, after=after, steps=steps)
    return replace(one, **given)


def test_energies_of_spans_are_added_for_each_gpu() -> None:
    found = joules_per_step([[measured()], [measured(joules=300.0, steps=20)]])
    assert found == pytest.approx((900 / 30, 450 / 30))


def test_span_counts_from_its_first_round_to_its_last() -> None:
    """A later round has no count before it."""
    later = measured(began=102.1, ended=104.1, before=(), after=(1005.0, 507.0))
    assert joules_per_step([[measured(), later]]) == pytest.approx((1000 / 20, 500 / 20))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ([measured(1.99)], "too few updates of the counter"),
        ([measured(1.0), measured(began=101.3, ended=102.3)], "too much waiting"),
        ([measured(before=())], "no counter"),
        ([measured(after=())], "no answer"),
    ],
)
def test_bad_span_gives_no_energy(other: list[Round], why: str) -> None:
    assert joules_per_step([[measured()], other]) == (), why


@BOUNDED
@given(st.floats(0.001, 0.1), st.floats(0, 1), st.floats(LEAST_SECONDS, 30))
def test_coarse_counter_errs_by_a_twentieth(period: float, phase: float, lasted: float) -> None:
    before, after = ((500.0 * period * math.floor(when / period + phase),) for when in (0.0, lasted))
    of_rounds = measured(began=0.0, ended=lasted, before=before, after=after, steps=1)
    (joules,) = joules_per_step([[of_rounds]])
    assert joules == pytest.approx(500.0 * lasted, rel=1.001 / 20)


def test_gpus_are_read_in_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [training(index, TotalEnergyConsumption=2_000_000 + index) for index in (0, 1)]
    refusing = training(2, TotalEnergyConsumption=refuses)
    install(monkeypatch, [*fakes, refusing])
    assert joules_now(fakes) == (2000.0, 2000.001)
    assert joules_now([*fakes, refusing]) == ()
    assert joules_now([None]) == (), "a lost GPU"
