"""Timing on the CPU: every step is called, and the time is that of all of them."""

from __future__ import annotations

import time

import pytest
import torch

from ddpperf.timing import seconds_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("iterations", [1, 2, 64])
def test_each_step_is_called_once(iterations: int) -> None:
    calls: list[None] = []
    seconds_of(lambda: calls.append(None), iterations, CPU)
    assert len(calls) == iterations


def test_the_time_is_that_of_all_steps() -> None:
    start = time.perf_counter()
    measured = seconds_of(lambda: time.sleep(0.02), 5, CPU)
    around = time.perf_counter() - start
    assert 5 * 0.02 <= measured <= around
