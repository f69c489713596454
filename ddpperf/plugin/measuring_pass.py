"""The measurements of all selected tests, and the worker processes that make them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from ddpperf.instruments.kernels import other_kernels
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.devices import Devices
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.plugin.options.sides import Sides
from ddpperf.plugin.progress import ProgressLine
from ddpperf.results.notes import Note, warning
from ddpperf.results.samples import Measured
from ddpperf.specs import CHECKPOINTS_VARIABLE, DATA_VARIABLE, MODEL_VARIABLE, TRACES_VARIABLE, Spec
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions


class Measuring:
    """The measurements of all tests in the same worker processes.

    Suspected regressions are measured by a second `Measuring` in new processes.

    pool: the worker processes, which start with the first measurement.
    measures: the `measure` fixtures by test id.
    """

    def __init__(self, pool: Pool, devices: Devices, sides: Sides | None = None) -> None:
        self.pool = pool
        self.measures: dict[str, Measure] = {}
        self._devices = devices
        self._sides = sides
        self._notes: dict[tuple[Spec, tuple[str, ...]], list[Note]] = {}

    def fixture(self, test: str, benchmark: BenchmarkFixture, machine: Machine) -> Measure:
        """Return the value of the `measure` fixture for one test."""
        self.measures[test] = Measure(benchmark, self.pool, self.notes, machine=machine, sides=self._sides)
        return self.measures[test]

    def measured(self) -> dict[str, Measured]:
        """Return the measurement of each measured test by test id."""
        measures = self.measures.items()
        return {test: measure.measured for test, measure in measures if measure.measured is not None}

    def notes(self, measured: Measured, fresh: bool) -> list[Note]:
        """Return the warnings about a measurement.

        fresh: whether the measurement was made just now. Warnings about the devices are then stored
        for the other tests that share the measurement.
        """
        key = measured.spec, tuple(sample.set for sample in measured.samples)
        if fresh:
            self._notes[key] = self._devices.warnings(measured.spec)
        return [*self._notes.get(key, []), *map(warning, other_kernels(measured))]

    def environment(self) -> dict[str, Any]:
        """Return the software versions of the ranks as JSON, or {} if no rank was started."""
        ranks = self.pool.environment()
        return ranks and ranks | self._devices.environment()


def make_pool(
    options: Options,
    devices: Devices,
    progress: ProgressLine,
    sides: Sides | None,
    replicates: int,
    sets_made: int,
) -> Pool:
    """Return worker processes for this environment, or for base and candidate of an A/B run.

    replicates: number of process sets per side.
    sets_made: number of process sets that earlier pools made.
    """
    paths = {
        DATA_VARIABLE: options.data.path,
        TRACES_VARIABLE: options.traces,
        CHECKPOINTS_VARIABLE: options.checkpoints,
        MODEL_VARIABLE: options.model,
    }
    common = {name: str(path) for name, path in paths.items() if path is not None}
    started = [Side()]
    if sides is not None:  # in random order: the first side of a round may meet colder caches
        started = random.sample([sides.base, sides.candidate], 2)
    in_common = SetOptions(
        size=max(options.world_sizes),
        device=options.device,
        rounds=options.rounds,
        deadline_seconds=options.deadline_seconds,
        log_folder=options.worker_logs,
        cores=devices.cores(),
    )
    return Pool(
        in_common,
        replicates=replicates,
        sets_made=sets_made,
        sides=[replace(side, environment=common | dict(side.environment)) for side in started],
        progress=progress,
        check_round=devices.check_round,
    )
