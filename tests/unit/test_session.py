"""What a run remembers between its tests: why a measurement was doubtful, for all that use it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddpperf.machine import hardware
from ddpperf.machine.links import Links
from ddpperf.plugin.session import Session
from ddpperf.results.notes import Note, warning
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import EpochSpec, Spec, TrainingSpec

STEP = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")


class Watch:
    """A disturbance that is told once, as the driver's is."""

    def __init__(self, *warnings: Note) -> None:
        self._warnings = list(warnings)

    def warnings(self) -> list[Note]:
        told, self._warnings = self._warnings, []
        return told


def session(tmp_path: Path) -> Session:
    options: Any = SimpleNamespace(device="cpu", links=Links(), world_sizes=(1,))
    return Session(options, [], tmp_path, None)


def measured(spec: Spec, name: str = "A1") -> Measured:
    return Measured(
        spec=spec, iterations=1, samples=(Sample(set=name, side="A", torch="2.11", seconds=((0.1,),)),)
    )


def test_a_disturbance_is_told_to_every_test_that_uses_the_measurement(tmp_path: Path) -> None:
    run: Any = session(tmp_path)
    run._watch = Watch(warning("GPU 0 was throttled"))
    assert run.warnings(measured(STEP), True) == [warning("GPU 0 was throttled")]
    assert run.warnings(measured(STEP), False) == [warning("GPU 0 was throttled")]
    assert run.warnings(measured(STEP, "A2"), True) == [], "another set measured it undisturbed"
    assert run.warnings(measured(dataclasses.replace(STEP, precision="bf16")), True) == []


def test_more_processes_than_cores_are_doubtful_with_the_loaders_among_them(tmp_path: Path) -> None:
    cores = hardware.core_count()
    epoch = EpochSpec(**{**dataclasses.asdict(STEP), "input": "dataloader", "loader_workers": cores})
    assert session(tmp_path).warnings(measured(epoch), True) == [
        warning(f"{cores + 1} processes share {cores} cores")
    ]
    assert (
        session(tmp_path).warnings(measured(dataclasses.replace(epoch, loader_workers=cores - 1)), True) == []
    )
