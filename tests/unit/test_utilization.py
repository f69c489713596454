"""The sampler of utilization: what drivers and processes refuse, its CPU time, and its thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from ddpperf.machine import utilization
from ddpperf.machine.utilization import MOST_POINTS, IdleLoad, Recorder, Sampler, averaged, gpu_now
from ddpperf.plugin.device_guard import Devices
from ddpperf.results.samples import Usage
from ddpperf.specs import AllReduceSpec, EpochSpec, TrainingSpec
from tests.fake_nvml import install, refuses, training

NO_PROCESS = 2**22 + 1  # above the kernel's largest process id
ALL = {
    "gpu_utilization": 0.97,
    "gpu_memory_bytes": 20e9,
    "power_watts": 612.5,
    "temperature_celsius": 55,
}


def sampler_of(*processes: int, gpus: Sequence[Any] = (), with_children: bool = False) -> Sampler:
    return Sampler(gpus, (0, 1), processes, with_children=with_children)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20  # on a busy machine
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def recorded(recorder: Recorder) -> Usage:
    usage = recorder.usage()
    assert usage is not None
    return usage


def keep_busy(seconds: float = 0.1) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


# --- GPUs


def test_gpu_is_read_in_si_units(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [fake := training()])
    assert gpu_now(fake) == ALL


def test_refused_fields_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [fake := training(UtilizationRates=refuses, FieldValues=refuses)])
    assert gpu_now(fake) == {**ALL, "gpu_utilization": None, "power_watts": 600.0}, "MIG, and an older driver"
    install(monkeypatch, [fake := training(MemoryInfo=refuses, FieldValues=refuses, PowerUsage=refuses)])
    assert gpu_now(fake) == {**ALL, "gpu_memory_bytes": None, "power_watts": None}


# --- CPUs and ranks


def test_busy_rank_keeps_a_core_busy() -> None:
    sampler = sampler_of(os.getpid())
    sampler.now()
    keep_busy()
    found = sampler.now()
    (busy,), (memory,) = found["rank_cpus"], found["rank_memory_bytes"]
    assert busy is not None
    assert 0.05 < busy < 1.3
    assert memory == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert 0 < (found["cpu_utilization"][0] or 0) <= 1


@pytest.mark.parametrize("asked", ["cpu_percent", "memory_info", "children"])
def test_rank_that_ends_meanwhile_raises_nothing(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    sampler = sampler_of(os.getpid(), NO_PROCESS, with_children=True)
    sampler.now()

    def ended(*_: object, **__: object) -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil.Process, asked, ended)
    monkeypatch.setattr(sampler, "_searched", 0.0)
    found = sampler.now()
    assert found["rank_cpus"][1] is found["rank_memory_bytes"][1] is None
    assert (found["rank_cpus"][0] is None) == (asked == "cpu_percent")
    assert (found["rank_memory_bytes"][0] is None) == (asked == "memory_info")


def test_loader_workers_count_as_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Mock(cpu_percent=lambda: 150.0, memory_info=lambda: SimpleNamespace(rss=10**15))
    monkeypatch.setattr(psutil.Process, "children", lambda rank, recursive: [worker] if recursive else [])
    for with_children in (False, True):
        found = sampler_of(os.getpid(), with_children=with_children).now()
        assert found["rank_cpus"] == [1.5 * with_children], "the first call of the rank itself begins"
        assert ((found["rank_memory_bytes"][0] or 0) >= 10**15) == with_children


def test_worker_that_is_found_again_keeps_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil measures the CPU time of a process since the last call for the same object."""
    monkeypatch.setattr(psutil.Process, "children", lambda rank, recursive: [psutil.Process()])
    monkeypatch.setattr(utilization, "CHILDREN_SECONDS", 0.0)
    sampler = sampler_of(os.getppid(), with_children=True)
    sampler.now()
    keep_busy()
    (busy,) = sampler.now()["rank_cpus"]
    assert busy is not None
    assert busy > 0.05


# --- the thread


def test_early_end_of_sampling_gives_no_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no utilization: the mean would be that of the beginning of a training."""
    percents = iter([[1.0]] * 2)  # the call for the second sample raises StopIteration
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: next(percents))
    devices = Devices((), 1)
    epoch = EpochSpec(world_size=1, per_rank_batch_size=8, strategy="single")
    recorder = devices.recorder(epoch, [], True)
    assert recorder._sampler is not None
    with recorder.round(1):
        wait_for(lambda: recorder._sampler and recorder._sampler.failed)
    assert len(recorder._sampler.samples) == 1
    assert recorder.usage() is None


def test_samples_come_ten_times_a_second_and_end_with_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [fake := training()])
    with (sampler := sampler_of(gpus=[fake, fake])).sampling():
        time.sleep(0.65)
    assert "ddpperf-sampler" not in {thread.name for thread in threading.enumerate()}
    assert 2 <= len(sampler.samples) <= 6
    assert all(values["gpu_utilization"] == [0.97, 0.97] for _, values in sampler.samples)


def test_costly_samples_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    def burn() -> SimpleNamespace:
        began = time.thread_time()
        while time.thread_time() - began < 0.01:
            pass
        return SimpleNamespace(gpu=1, memory=1)

    install(monkeypatch, [fake := training(UtilizationRates=burn)])
    with (sampler := sampler_of(gpus=[fake])).sampling():
        time.sleep(0.9)
    assert len(sampler.samples) == 1  # the next one is due 1 s after the begin


# --- the idle load


def test_process_that_ends_meanwhile_is_left_out_of_the_idle_load() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        load = IdleLoad([[os.getpid(), child.pid, NO_PROCESS]])
        with load.round():
            keep_busy()
        child.kill()
    keep_busy(0.1)
    with load.round():
        pass
    counters = load.counters()
    (used,), (seconds,) = counters["idle_cpu_seconds"], counters["idle_seconds"]
    tick = 1 / os.sysconf("SC_CLK_TCK")  # of the kernel's CPU times
    assert 0.1 - 2 * tick < used <= seconds + 2 * tick, "the work in the round does not count"


def test_children_that_start_and_end_between_rounds_are_counted() -> None:
    command = [sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 0.2: pass"]
    load = IdleLoad([[os.getpid()]])
    with load.round():
        pass
    for _ in range(2):
        subprocess.run(command, check=True)
    with load.round():
        pass
    (used,) = load.counters()["idle_cpu_seconds"]
    assert used >= 0.4 - 4 / os.sysconf("SC_CLK_TCK")


def test_idle_load_needs_a_pause_between_rounds() -> None:
    with (load := IdleLoad([[os.getpid()]])).round():
        keep_busy()
    assert load.counters() == {}


# --- the recorder


WATTS = (500.0, 100.0)


class Meter:
    """A clock, and energy counters of GPUs whose handles are their watts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(utilization, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(utilization, "joules_now", lambda gpus: tuple(watts * self.now for watts in gpus))

    def rounds(
        self, recorder: Recorder, count: int, seconds: float, pause: float = 0, steps: int = 4
    ) -> None:
        for _ in range(count):
            with recorder.round(steps):
                self.now += seconds
            self.now += pause


def test_energy_of_rounds_is_that_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    Meter(monkeypatch).rounds(recorder := Recorder(WATTS), 10, seconds=0.3)
    assert recorded(recorder).joules == pytest.approx((500 * 3 / 40, 100 * 3 / 40))


def test_process_sets_in_turn_need_long_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    of_steps, of_epochs = (Recorder(WATTS, alone=False) for _ in range(2))
    for _ in range(10):
        meter.rounds(of_steps, 1, seconds=0.01)
        meter.rounds(of_epochs, 1, seconds=2.5, steps=1)
    assert of_steps.usage() is None
    assert recorded(of_epochs).joules == pytest.approx((1250.0, 250.0))


def test_first_gpus_are_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [
        training(index, UtilizationRates=SimpleNamespace(gpu=10 * index, memory=0)) for index in range(3)
    ]
    install(monkeypatch, fakes)
    devices = Devices([fakes[place].gpu for place in (2, 1, 0)], 3)  # the order of CUDA
    fields: dict[str, Any] = {"per_rank_batch_size": 2, "epoch_images": 8}
    recorder = devices.recorder(EpochSpec(world_size=2, strategy="ddp", **fields), [], True)
    assert recorder._sampler is not None
    with recorder.round(1):
        wait_for(lambda: recorder._sampler and recorder._sampler.samples)
    usage = recorded(recorder)
    assert usage.mean["gpu_utilization"] == (0.2, 0.1)
    assert usage.joules == (), "a short round"
    assert recorder._gpus == [fakes[2], fakes[1]]
    step = devices.recorder(TrainingSpec(world_size=1, strategy="single", **fields), [], True)
    assert step._sampler is None
    loads = EpochSpec(world_size=1, strategy="single", input="dataloader", loader_workers=2, **fields)
    sampled = [
        devices.recorder(spec, [], True)._sampler for spec in (loads, replace(loads, loader_workers=0))
    ]
    assert [sampler._with_children for sampler in sampled if sampler is not None] == [True, False]
    assert devices.recorder(AllReduceSpec(world_size=2, nbytes=8), [], True)._gpus == ()


def test_long_series_is_averaged_but_peaks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, sampler, count = Meter(monkeypatch), sampler_of(), 10 * MOST_POINTS
    sampler.samples = [(0.1 * number, {"power_watts": [612.5, 612.5]}) for number in range(count)]
    sampler.samples[77][1]["power_watts"][0] = 700.0
    monkeypatch.setattr(Sampler, "sampling", lambda self: nullcontext())
    meter.rounds(recorder := Recorder((), sampler), 1, seconds=0.1 * count)
    usage = recorded(recorder)
    assert len(usage.seconds) == len(usage.series["power_watts"][0]) == MOST_POINTS
    assert max(value for value in usage.series["power_watts"][0] if value is not None) < 622
    assert usage.peak["power_watts"] == (700.0, 612.5)
    assert usage.seconds[-1] == pytest.approx(0.1 * count, rel=0.01)


@pytest.mark.parametrize(
    ("values", "most", "points"),
    [
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
