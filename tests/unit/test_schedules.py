"""Learning rates: each schedule's own, by hand, after a warm-up, over all steps of a run; and rates of larger batches."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from ddpperf.specs import ScheduleName
from ddpperf.specs.run import linearly_scaled, square_root_scaled
from ddpperf.training.schedules import scheduled_rates

TRIANGLE = [0.2, 0.6 + 0.2, 1.4, 2.0, 1.4, 0.8]


@pytest.mark.parametrize(
    ("name", "steps", "rates"),
    [
        ("constant", 3, [2.0, 2.0, 2.0]),
        ("step", 6, [2.0, 2.0, 0.2, 0.2, 0.02, 0.02]),
        ("multistep", 8, [2.0, 2.0, 2.0, 2.0, 0.2, 0.2, 0.02, 0.02]),
        ("cosine", 4, [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)]),
        ("linear", 5, [2.0, 1.5005, 1.001, 0.5015, 0.002]),
        ("cyclic", 12, TRIANGLE * 2),
        ("cyclic", 6, [0.2, 1.4, 1.4, 0.2, 1.4, 1.4]),
    ],
)
def test_a_schedules_rates_are_its_own(name: ScheduleName, steps: int, rates: list[float]) -> None:
    assert scheduled_rates(name, 2.0, steps=steps, warm_up=0) == pytest.approx(rates)


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_a_warm_up_comes_first_and_the_schedule_has_the_rest(name: ScheduleName) -> None:
    rates = scheduled_rates(name, 3.0, steps=14, warm_up=4)
    first = 0.3 if name == "cyclic" else 3.0  # which begins below its peak
    assert rates[:4] == pytest.approx([first * (0.001 + 0.999 * step / 4) for step in range(4)])
    assert rates[4:] == scheduled_rates(name, 3.0, steps=10, warm_up=0)
    assert len(rates) == 14


@pytest.mark.parametrize("name", get_args(ScheduleName))
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_rates_too(name: ScheduleName, steps: int) -> None:
    for warm_up in range(steps + 1):
        rates = scheduled_rates(name, 1.0, steps=steps, warm_up=warm_up)
        assert len(rates) == steps
        assert all(0 < rate <= 1 + 1e-9 for rate in rates)
        if warm_up < steps:
            assert rates[warm_up] == pytest.approx(0.1 if name == "cyclic" else 1), (
                "as if there had been no warm-up"
            )
            assert rates[warm_up] == max(rates[: warm_up + 1])


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="a warm-up of 5 steps is longer than the run of 4; make it shorter"):
        scheduled_rates("cosine", 1.0, steps=4, warm_up=5)


def test_larger_batches_have_larger_rates() -> None:
    assert linearly_scaled(0.1, 8192, 128) == pytest.approx(6.4)
    assert square_root_scaled(0.1, 8192, 128) == pytest.approx(0.8)
    assert linearly_scaled(0.1, 128, 128) == square_root_scaled(0.1, 128, 128) == 0.1
