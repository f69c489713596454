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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="device events are a GPU's; found none, run this on one")
def test_on_a_gpu_the_time_is_the_devices_and_not_that_of_its_launches() -> None:
    device = torch.device("cuda", 0)
    matrix = torch.randn(4096, 4096, device=device)

    def step() -> None:
        torch.mm(matrix, matrix)

    seconds_of(step, 3, device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        step()
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    done = time.perf_counter() - start
    assert launched < 0.5 * done, "the launches are over long before the work"
    assert seconds_of(step, 20, device) == pytest.approx(done, rel=0.2)
