"""The sampler of utilization: what drivers and processes refuse, its CPU time, and its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddpperf.machine import energy, utilization
from ddpperf.machine.energy import EnergyCounters
from ddpperf.machine.utilization import CpuSampler, Recorder, Sampler, gpu_now
from ddpperf.plugin.devices import Devices
from ddpperf.results.usage import MOST_POINTS, averaged
from ddpperf.specs import AllReduceSpec, EpochSpec, TrainingSpec
from tests.fake_nvml import field_values, install, refuses, training

NO_PROCESS = 2**22 + 1  # above the kernel's largest process id
ALL = {
    "gpu_utilization": 0.97,
    "gpu_memory_bytes": 20e9,
    "power_watts": 612.5,
    "temperature_celsius": 55,
    "sm_clock_hertz": 1.98e9,
}


def cpu(*processes: int, cores: tuple[int, ...] = (0,), with_children: bool = False) -> CpuSampler:
    return CpuSampler(cores, processes, with_children=with_children)


def samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ddpperf-sampler"]


def wait_for_sample(sampler: Sampler) -> None:
    wait_for(lambda: bool(sampler.samples))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20  # on a busy machine
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


# --- GPUs


def test_gpu_is_read_in_si_units(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [fake := training()])
    assert gpu_now(fake) == ALL


@pytest.mark.parametrize(
    ("function", "quantity"),
    [
        ("UtilizationRates", "gpu_utilization"),  # as with MIG
        ("MemoryInfo", "gpu_memory_bytes"),
        ("Temperature", "temperature_celsius"),
        ("ClockInfo", "sm_clock_hertz"),
    ],
)
def test_one_refused_field_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, function: str, quantity: str
) -> None:
    answers: dict[str, Any] = {function: refuses()}
    install(monkeypatch, [fake := training(**answers)])
    assert gpu_now(fake) == {**ALL, quantity: None}


def test_older_driver_has_averaged_power(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [fake := training(FieldValues=field_values({}))])
    assert gpu_now(fake)["power_watts"] == 600.0
    install(monkeypatch, [fake := training(FieldValues=refuses(), PowerUsage=refuses())])
    assert gpu_now(fake)["power_watts"] is None


# --- CPUs and ranks


def test_busy_rank_keeps_a_core_busy() -> None:
    sampler = cpu(psutil.Process().pid, cores=(0, 1))
    sampler.now()
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    found = sampler.now()
    (busy,), (memory,) = found["rank_cpus"], found["rank_memory_bytes"]
    assert busy is not None
    assert memory is not None
    assert 0.05 < busy < 1.3
    assert memory == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert len(found["core_utilization"]) <= 2
    assert all(0 <= value <= 1 for value in found["core_utilization"] if value is not None)


@pytest.mark.parametrize("asked", ["cpu_times", "memory_info", "children"])
def test_rank_that_ends_meanwhile_raises_nothing(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    sampler = cpu(psutil.Process().pid, with_children=True)
    sampler.now()

    def ended(*_: object, **__: object) -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil.Process, asked, ended)
    found = sampler.now()
    assert (found["rank_cpus"] == [None]) == (asked == "cpu_times")
    assert (found["rank_memory_bytes"] == [None]) == (asked == "memory_info")


def test_loader_workers_count_as_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process stands for the rank's worker, with the memory and CPU time of this one."""
    this, twice = psutil.Process(), SimpleNamespace()
    for name in ("cpu_times", "memory_info"):
        setattr(twice, name, getattr(this, name))
    twice.pid = NO_PROCESS
    monkeypatch.setattr(psutil.Process, "children", lambda rank, recursive: [twice] if recursive else [])
    for with_children, times in ((False, 1), (True, 2)):
        sampler = cpu(this.pid, with_children=with_children)
        sampler.now()  # finds the worker
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
        before, elapsed = sampler._seconds, -sampler._when
        found = sampler.now()
        elapsed += sampler._when
        (busy,), (memory,) = found["rank_cpus"], found["rank_memory_bytes"]
        assert memory == pytest.approx(times * this.memory_info().rss, rel=0.2)
        own = sampler._seconds[0][this.pid] - before[0][this.pid]
        assert busy == pytest.approx(times * own / elapsed, rel=0.3)


# --- the thread


def test_samples_come_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [fake := training()])
    sampler = Sampler([fake, fake], cpu())
    with sampler.sampling():
        time.sleep(0.65)
    assert 2 <= len(sampler.samples) <= 6
    assert all(values["gpu_utilization"] == [0.97, 0.97] for _, values in sampler.samples)
    assert not samplers()


def test_early_end_of_sampling_gives_no_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no utilization: the mean would be that of the beginning of a training."""
    memory = iter([psutil.virtual_memory()] * 2)  # the call for the second sample raises StopIteration
    monkeypatch.setattr(psutil, "virtual_memory", lambda: next(memory))
    devices = Devices((), 1)
    recorded = EpochSpec(world_size=1, per_rank_batch_size=8, strategy="single")
    recorder = devices.recorder(recorded, [], True)
    assert recorder._sampler is not None
    with recorder.round(1):
        wait_for(lambda: bool(recorder._sampler and recorder._sampler.problem))
    assert len(recorder._sampler.samples) == 1
    assert recorder.usage() is None


def test_costly_samples_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    def burn(seconds: float = 0.02) -> SimpleNamespace:
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            pass
        return SimpleNamespace(gpu=1, memory=1)

    install(monkeypatch, [fake := training(UtilizationRates=burn)])
    sampler = Sampler([fake], cpu())
    with sampler.sampling():
        time.sleep(0.8)
    assert len(sampler.samples) == 1  # the next one is due 1 s after the first one
    assert sampler.cpu_fraction < 0.06  # 10 Hz would take 0.2


# --- the recorder


class Meter:
    """An energy counter of two GPUs at 500 W and 100 W on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(utilization, "time", clock)
        self.counters = EnergyCounters(read=lambda: (500 * self.now, 100 * self.now), update_seconds=1e-3)

    def rounds(self, recorder: Recorder, count: int, seconds: float, pause: float, steps: int = 4) -> None:
        for _ in range(count):
            with recorder.round(steps):
                self.now += seconds
            self.now += pause


def test_energy_of_rounds_is_that_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    recorder = Recorder(meter.counters, devices=2)
    meter.rounds(recorder, 10, seconds=0.05, pause=0.0)
    usage = recorder.usage()
    assert usage is not None
    assert usage.joules == pytest.approx((500 * 0.5 / 40, 100 * 0.5 / 40))


def test_process_sets_in_turn_need_long_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    of_steps, of_epochs = (Recorder(meter.counters, 2, alone=False) for _ in range(2))
    for _ in range(10):
        meter.rounds(of_steps, 1, seconds=0.01, pause=0.0)
        meter.rounds(of_epochs, 1, seconds=1.0, pause=0.0, steps=1)
    assert of_steps.usage() is None
    usage = of_epochs.usage()
    assert usage is not None
    assert usage.joules == pytest.approx((500.0, 100.0))


def test_pauses_between_rounds_give_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    recorder = Recorder(meter.counters, 2)
    meter.rounds(recorder, 10, seconds=0.05, pause=0.01)
    assert recorder.usage() is None


def with_samples(monkeypatch: pytest.MonkeyPatch, count: int, watts: float | None = 612.5) -> Recorder:
    """A recorder whose sampler has sampled one round of 4 steps at 10 Hz."""
    meter = Meter(monkeypatch)
    sampler = Sampler([], cpu())
    sampler.samples = [(0.1 * number, {"power_watts": [watts, watts]}) for number in range(count)]
    monkeypatch.setattr(Sampler, "sampling", lambda self: nullcontext())
    recorder = Recorder(None, 2, sampler)
    meter.rounds(recorder, 1, seconds=0.1 * count, pause=0.0)
    return recorder


def test_first_gpus_are_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "WATCH_SECONDS", 0.0)
    fakes = [
        training(index, UtilizationRates=SimpleNamespace(gpu=10 * index, memory=0)) for index in range(3)
    ]
    install(monkeypatch, fakes)
    devices = Devices([fakes[place].gpu for place in (2, 1, 0)], 3)  # the order of CUDA
    fields: dict[str, Any] = {"per_rank_batch_size": 2, "epoch_images": 8}
    recorder = devices.recorder(EpochSpec(world_size=2, strategy="ddp", **fields), [], True)
    assert recorder._sampler is not None
    with recorder.round(1):
        wait_for_sample(recorder._sampler)
    usage = recorder.usage()
    assert usage is not None
    assert usage.mean["gpu_utilization"] == (0.2, 0.1)
    assert usage.joules == ()  # the counter did not move
    step = devices.recorder(TrainingSpec(world_size=1, strategy="single", **fields), [], True)
    assert step._sampler is None
    loads = EpochSpec(world_size=1, strategy="single", input="dataloader", loader_workers=2, **fields)
    sampled = [
        devices.recorder(spec, [], True)._sampler for spec in (loads, replace(loads, loader_workers=0))
    ]
    assert [sampler._cpu._with_children for sampler in sampled if sampler is not None] == [True, False]
    assert devices.recorder(AllReduceSpec(world_size=2, nbytes=8), [], True)._counters is None


def test_long_series_is_averaged_but_peaks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = with_samples(monkeypatch, 10 * MOST_POINTS)
    assert recorder._sampler is not None
    recorder._sampler.samples[77][1]["power_watts"][0] = 700.0
    usage = recorder.usage()
    assert usage is not None
    assert len(usage.seconds) == len(usage.series["power_watts"][0]) == MOST_POINTS
    assert max(value for value in usage.series["power_watts"][0] if value is not None) < 622
    assert usage.peak["power_watts"] == (700.0, 612.5)
    assert usage.seconds[-1] == pytest.approx(0.1 * 10 * MOST_POINTS, rel=0.01)


@pytest.mark.parametrize(
    ("values", "most", "points"),
    [
        ([], 3, ()),
        ([1.0, 2.0, 3.0], 3, (1.0, 2.0, 3.0)),
        ([1.0, 2.0, 3.0, 4.0], 3, (1.5, 3.5)),
        ([1.0, None, None, None, 5.0], 3, (1.0, None, 5.0)),
        ([1234.5678], 3, (1235.0,)),
    ],
)
def test_points_are_rounded_means(
    values: list[float | None], most: int, points: tuple[float | None, ...]
) -> None:
    assert averaged(values, most) == points
