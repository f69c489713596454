"""Learning rates: each schedule, the warm-up, captured rates, and rates of larger batches."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from ddpperf.specs.whole_training import ScheduleName
from ddpperf.training.schedules import Schedule, scheduled_rates

STEPS = 5
RATES = scheduled_rates("cosine", 0.01, steps=STEPS, warm_up=0)

TRIANGLE = [0.2, 0.6 + 0.2, 1.4, 2.0, 1.4, 0.8]
# From 2 in step 2 of 10 to 8e-6 in step 9, along half a cosine
FALL = [8e-6 + (1 - 4e-6) * (1 + math.cos(math.pi * step / 7)) for step in range(7)]


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
        ("one_cycle", 10, [0.08, 1.04, *FALL, 8e-6]),
    ],
)
def test_each_schedule_has_its_rates(name: ScheduleName, steps: int, rates: list[float]) -> None:
    assert scheduled_rates(name, 2.0, steps=steps, warm_up=0) == pytest.approx(rates)


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_a_warm_up_comes_first_and_the_schedule_has_the_rest(name: ScheduleName) -> None:
    rates = scheduled_rates(name, 3.0, steps=14, warm_up=4)
    first = 3.0 * {"cyclic": 0.1, "one_cycle": 0.04}.get(name, 1)  # these begin below their peak
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
        if warm_up < steps and name != "one_cycle":  # so few steps are only its end
            assert rates[warm_up] == pytest.approx(0.1 if name == "cyclic" else 1), (
                "as if there had been no warm-up"
            )
            assert rates[warm_up] == max(rates[: warm_up + 1])


# --- what sets the rates


class Trained:
    """Two parameter groups under a schedule, with gradient 1 in every step."""

    def __init__(self, *, captured: bool) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        self.optimizer = torch.optim.SGD([{"params": [each]} for each in self.parameters], lr=7.0)
        self.schedule = Schedule(self.optimizer, RATES, torch.device("cpu") if captured else None)

    def epoch(self, steps: int = STEPS) -> list[float]:
        """Train some steps, and return the rate of each."""
        self.schedule.begin()
        rates = []
        for _ in range(steps):
            self.schedule.step()
            one, other = (float(group["lr"]) for group in self.optimizer.param_groups)
            assert one == other
            rates.append(one)
            for parameter in self.parameters:
                parameter.grad = torch.ones(3)
            self.optimizer.step()
        return rates


@pytest.mark.parametrize("captured", [False, True])
def test_each_epoch_repeats_the_rates(captured: bool) -> None:
    trained, expected = Trained(captured=captured), RATES
    for _ in range(2):
        assert trained.epoch() == pytest.approx(expected, rel=1e-6)
    assert trained.epoch(steps=2) == pytest.approx(expected[:2], rel=1e-6)
    assert trained.epoch() == pytest.approx(expected, rel=1e-6), "also after one that was broken off"
    moved = torch.full((3,), -(3 * sum(expected) + sum(expected[:2])))
    for parameter in trained.parameters:
        torch.testing.assert_close(parameter.detach(), moved, rtol=1e-5, atol=0)


def test_captured_rates_stay_at_their_addresses() -> None:
    """A CUDA graph holds these addresses; the start of an epoch is not in the graph."""
    schedule = Trained(captured=True).schedule
    groups = schedule.optimizer.param_groups
    rates: list[Tensor] = [group["lr"] for group in groups]
    places = [rates[0].data_ptr(), schedule.step_on_device.data_ptr()]
    for _ in range(2):
        schedule.begin()
        for _ in range(STEPS):
            schedule.step()
    assert all(group["lr"] is rates[0] for group in groups)
    assert [rates[0].data_ptr(), schedule.step_on_device.data_ptr()] == places
