"""Warnings about a measurement are kept for every test that uses it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from ddpperf.machine import hardware
from ddpperf.plugin.devices import Devices
from ddpperf.plugin.measure_fixture import Measuring
from ddpperf.results.notes import Note, warning
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import EpochSpec, Spec, TrainingSpec

STEP = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")


class Watch:
    """A watch that reports its warnings once, as the driver does."""

    def __init__(self, *warnings: Note) -> None:
        self._warnings = list(warnings)

    def warnings(self) -> list[Note]:
        reported, self._warnings = self._warnings, []
        return reported


def measuring(watch: Watch | None = None) -> Measuring:
    """Return a pass without process sets."""
    devices: Any = Devices([], 1)
    devices._watch = watch
    unused: Any = None
    return Measuring(unused, devices)


def measured(spec: Spec, name: str = "A1") -> Measured:
    sample = Sample(set=name, side="A", torch="2.11", seconds=((0.1,),))
    return Measured(spec=spec, iterations=1, samples=(sample,))


def test_all_tests_of_a_measurement_get_its_warnings() -> None:
    first = measuring(Watch(warning("GPU 0 was throttled")))
    assert first.notes(measured(STEP), True) == [warning("GPU 0 was throttled")]
    assert first.notes(measured(STEP), False) == [warning("GPU 0 was throttled")]
    assert first.notes(measured(STEP, "A2"), True) == [], "another set measured it undisturbed"
    assert first.notes(measured(dataclasses.replace(STEP, precision="bf16")), True) == []


def test_more_processes_than_cores_are_warned_about() -> None:
    cores = hardware.core_count()
    epoch = EpochSpec(**{**dataclasses.asdict(STEP), "input": "dataloader", "loader_workers": cores})
    assert measuring().notes(measured(epoch), True) == [warning(f"{cores + 1} processes share {cores} cores")]
    fewer = dataclasses.replace(epoch, loader_workers=cores - 1)
    assert measuring().notes(measured(fewer), True) == []


def test_sets_that_ran_other_kernels_are_warned_about() -> None:
    samples = [
        Sample(set=name, side="A", torch="2.11", seconds=((0.1,),), kernels=kernels)
        for name, kernels in (("A1", "x"), ("A2", "x"), ("A3", "y"))
    ]
    different = Measured(spec=STEP, iterations=1, samples=tuple(samples))
    for fresh in (True, False):
        assert measuring().notes(different, fresh) == [
            warning("process set A3 ran other kernels than all others")
        ]


def test_devices_ask_their_watch_after_a_round() -> None:
    devices: Any = Devices([], 1)
    assert devices.check_round([1], 1) == ""
    devices._watch = SimpleNamespace(look=lambda own, done: f"{own} and {done}")
    assert devices.check_round([7], 2) == "[7] and 2"
