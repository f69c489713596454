"""Timing: every step is called, the time is that of all of them, and a slow-down on purpose is in it."""

from __future__ import annotations

import time

import pytest
import torch

from ddpperf.timing import delayed, seconds_of

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


@pytest.mark.parametrize("seconds", [0.02, 0.05])
def test_a_delayed_step_takes_so_much_longer(seconds: float) -> None:
    calls: list[None] = []
    step = delayed(lambda: calls.append(None), seconds, CPU)
    fastest = min(seconds_of(step, 2, CPU) for _ in range(3))  # the machine may be busy
    assert len(calls) == 6
    assert 2 * seconds <= fastest < 2 * seconds + 0.02


def test_the_delay_comes_on_top_of_the_step() -> None:
    step = delayed(lambda: time.sleep(0.03), 0.03, CPU)
    assert seconds_of(step, 1, CPU) >= 0.06


@pytest.mark.parametrize("seconds", [0, 0.0])
def test_no_delay_is_the_very_function(seconds: float) -> None:
    def step() -> None:
        raise AssertionError

    assert delayed(step, seconds, CPU) is step


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the device spins on a GPU; found none, run this on one")
def test_on_a_gpu_the_device_is_slowed_down_and_not_its_launches() -> None:
    device = torch.device("cuda", 0)
    step = delayed(lambda: None, 0.02, device)
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    launched = time.perf_counter() - start
    assert launched < 0.01
    assert seconds_of(step, 5, device) == pytest.approx(0.1, rel=0.1)


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
