"""The learning rate: half a cosine over an epoch's steps, and the same by a number or by what a graph can move."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddpperf.training.schedules import PEAK_RATE, Schedule, cosine_rates
from tests.generated import BOUNDED

CPU = torch.device("cpu")
STEPS = 5


@pytest.mark.parametrize(
    ("steps", "rates"),
    [
        (1, [2.0]),
        (2, [2.0, 1.0]),
        (3, [2.0, 1.5, 0.5]),
        (4, [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)]),
    ],
)
def test_the_rates_are_those_of_half_a_cosine(steps: int, rates: list[float]) -> None:
    assert cosine_rates(2.0, steps) == pytest.approx(rates)


@BOUNDED
@given(st.floats(1e-6, 1e3), st.integers(1, 500))
def test_the_rates_fall_from_the_peak_and_never_to_0(peak: float, steps: int) -> None:
    rates = cosine_rates(peak, steps)
    assert (len(rates), rates[0]) == (steps, peak)
    assert rates[-1] > 0
    assert all(earlier > later for earlier, later in itertools.pairwise(rates))
    assert sum(rates) == pytest.approx(peak * (steps + 1) / 2), (
        "what is above the half is what is below it, but for the peak"
    )


class Trained:
    """Two groups of parameters under a schedule, each with the gradient 1 in every step."""

    def __init__(self, *, captured: bool) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        self.optimizer = torch.optim.SGD([{"params": [each]} for each in self.parameters], lr=7.0)
        self.schedule = Schedule(self.optimizer, cosine_rates(PEAK_RATE, STEPS), CPU, captured=captured)

    def epoch(self, steps: int = STEPS) -> list[float]:
        """The rate of each step, as both groups had it."""
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
def test_each_step_of_an_epoch_has_its_rate_and_the_next_epoch_begins_anew(captured: bool) -> None:
    trained, expected = Trained(captured=captured), cosine_rates(PEAK_RATE, STEPS)
    for _ in range(2):
        assert trained.epoch() == pytest.approx(expected, rel=1e-6)
    assert trained.epoch(steps=2) == pytest.approx(expected[:2], rel=1e-6)
    assert trained.epoch() == pytest.approx(expected, rel=1e-6), "also after one that was broken off"
    moved = torch.full((3,), -(3 * sum(expected) + sum(expected[:2])))
    for parameter in trained.parameters:
        torch.testing.assert_close(parameter.detach(), moved, rtol=1e-5, atol=0)


def test_what_a_graph_moves_stays_at_its_place() -> None:
    """It has the addresses of the rate and of the counter in it, and an epoch's beginning is outside of it."""
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
