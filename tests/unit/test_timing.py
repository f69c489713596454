"""Timing: every step is called and timed, and an added delay shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddpperf.measuring import clock as timing
from ddpperf.measuring.clock import delayed, keep_busy, launch_cost, seconds_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("seconds", [0.02, 0.05])
def test_a_delayed_step_takes_longer_by_the_delay(seconds: float) -> None:
    calls: list[None] = []
    step = delayed(lambda: calls.append(None), seconds, CPU)
    fastest = min(seconds_of(step, 2, CPU) for _ in range(30))  # the machine may be busy
    assert len(calls) == 60
    assert 2 * seconds <= fastest < 2 * seconds + 0.02


def test_gpu_is_timed_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is recorded before the steps, the second after them, and awaited before it is read."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record = lambda stream: done.append(stream)
            self.synchronize = lambda: done.append("await")

        def elapsed_time(self, last: Event) -> float:
            return 1500.0 if last is not self and done[-1] == "await" else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"record on {device}")
    assert seconds_of(lambda: done.append("step"), 2, torch.device("cuda", 0)) == 1.5, "milliseconds are read"
    assert done == ["record on cuda:0", "step", "step", "record on cuda:0", "await"]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="device events are a GPU's; found none, run this on one"
)
def test_on_a_gpu_the_devices_time_counts() -> None:
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches go to a GPU; found none, run this on one")
def test_slow_launches_on_a_busy_gpu_do_not_count() -> None:
    device = torch.device("cuda", 0)
    number = torch.zeros(1, device=device)

    def step() -> None:
        end = time.perf_counter() + 1e-4
        while time.perf_counter() < end:
            pass
        number.add_(1)

    keep_busy(1e-3)
    step()
    torch.cuda.synchronize()
    assert seconds_of(step, 8, device) > 6e-4, "a GPU that is not busy waits for the launches"
    keep_busy(2e-3)
    assert seconds_of(step, 8, device) < 3e-4


@pytest.mark.parametrize("grouped", [False, True])
def test_launch_cost_is_measured_on_an_idle_device(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device spins for more than twice a step's launch; then the ranks meet, untimed."""
    clock = SimpleNamespace(cpu=0.0, wall=0.0)
    costs, on_device = iter((5.0, 1.0, 2.0, 9.0, 3.0) * 2), iter((50.0, 10.0, 20.0, 90.0, 30.0))
    done: list[str] = []

    def step() -> None:
        cost = next(costs)
        clock.cpu += cost
        clock.wall += 2 * cost
        done.append("step")

    def read(step: Callable[[], None], iterations: int, _: torch.device) -> float:
        assert iterations == 1
        done.append("read")
        step()
        return next(on_device)

    clocks = SimpleNamespace(process_time=lambda: clock.cpu, perf_counter=lambda: clock.wall)
    monkeypatch.setattr(timing, "PROBES", 5)
    monkeypatch.setattr(timing, "time", clocks)
    monkeypatch.setattr(timing, "seconds_of", read)
    monkeypatch.setattr(timing, "synchronize", lambda _: done.append("wait"))
    monkeypatch.setattr(timing, "_cycles_per_second", lambda *_: 1000.0)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(f"spin {cycles}"))
    monkeypatch.setattr(dist, "all_reduce", lambda _: done.append("meet"))
    assert launch_cost(step, CPU, grouped=grouped) == (1.0, 30.0)
    before = ["wait", "spin 12001", "meet"] if grouped else ["wait", "spin 12001"]
    assert done == ["wait", "step"] * 5 + [*before, "read", "step"] * 5
