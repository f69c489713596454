"""How many steps make a round: as many as last about as long as asked for, and the same number for equal work."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.workers.pool import ROUND_SECONDS, choose_iterations
from tests.generated import BOUNDED


@pytest.mark.parametrize(
    ("step_seconds", "limit", "round_seconds", "iterations"),
    [
        (0.132, 1000, 0.05, 1),
        (0.05, 1000, 0.05, 1),
        (0.025, 1000, 0.05, 2),
        (0.0126, 1000, 0.05, 2),
        (0.0125, 1000, 0.05, 4),
        (0.0125, 1000, 0.3, 16),
        (20e-6, 1000, 0.05, 512),
        (20e-6, 4096, 0.05, 2048),
        (20e-6, 4096, 0.01, 256),
        (20e-6, 1, 0.05, 1),
        (0.0, 1000, 0.05, 512),
        (math.inf, 1000, 0.05, 1),
    ],
)
def test_a_round_lasts_about_as_long_as_asked_for(
    step_seconds: float, limit: int, round_seconds: float, iterations: int
) -> None:
    assert choose_iterations(step_seconds, limit, round_seconds) == iterations


@BOUNDED
@given(st.floats(1e-8, 1e4), st.integers(1, 10**6), st.sampled_from(sorted(ROUND_SECONDS.values())))
def test_iterations_are_the_largest_power_of_two_that_fits(step_seconds: float, limit: int, round_seconds: float) -> None:
    iterations = choose_iterations(step_seconds, limit, round_seconds)
    assert iterations.bit_count() == 1
    assert iterations <= limit
    assert iterations == 1 or iterations * step_seconds <= round_seconds * (1 + 1e-12)
    assert 2 * iterations > limit or 2 * iterations * step_seconds > round_seconds * (1 - 1e-12)
