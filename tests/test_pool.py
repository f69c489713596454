"""How many steps make a round: about 50 ms of them, and the same number for equal work."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.workers.pool import ROUND_SECONDS, choose_iterations
from tests.strategies import BOUNDED


@pytest.mark.parametrize(
    ("step_seconds", "limit", "iterations"),
    [
        (0.132, 1000, 1),
        (0.05, 1000, 1),
        (0.025, 1000, 2),
        (0.0126, 1000, 2),
        (0.0125, 1000, 4),
        (20e-6, 1000, 512),
        (20e-6, 4096, 2048),
        (20e-6, 1, 1),
        (0.0, 1000, 512),
        (math.inf, 1000, 1),
    ],
)
def test_a_round_lasts_about_50_ms(step_seconds: float, limit: int, iterations: int) -> None:
    assert choose_iterations(step_seconds, limit) == iterations


@BOUNDED
@given(st.floats(1e-8, 1e4), st.integers(1, 10**6))
def test_iterations_are_the_largest_power_of_two_that_fits(step_seconds: float, limit: int) -> None:
    iterations = choose_iterations(step_seconds, limit)
    assert iterations.bit_count() == 1
    assert iterations <= limit
    assert iterations == 1 or iterations * step_seconds <= ROUND_SECONDS * (1 + 1e-12)
    assert 2 * iterations > limit or 2 * iterations * step_seconds > ROUND_SECONDS * (1 - 1e-12)
