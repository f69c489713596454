"""The measurements of all selected tests, and the worker processes that make them."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    """Runs the measurements of tests in worker processes, which start with the first measurement.

    Suspected regressions of an A/B run are measured by a second `Measuring` in new processes.

    sides: base and candidate; None if all processes run in this environment.
    measures: the `measure` fixtures by test id.
    replicates: number of process sets per side.
    after: the earlier `Measuring`; its names of process sets are not used again.
    """

    def __init__(
        self,
        options: Options,
        devices: Devices,
        progress: ProgressLine,
        *,
        sides: Sides | None = None,
        replicates: int = 1,
        after: Measuring | None = None,
    ) -> None:
        self.sides = sides
        self.measures: dict[str, Measure] = {}
        self._options = options
        self._devices = devices
        self._progress = progress
        self._replicates = replicates
        self._sets_made = after._pool.sets_made if after is not None and after._pool is not None else 0
        self._pool: Pool | None = None
        self._notes: dict[tuple[Spec, tuple[str, ...]], list[Note]] = {}

    def fixture(self, test: str, benchmark: BenchmarkFixture, machine: Machine) -> Measure:
        """Return the value of the `measure` fixture for one test."""
        self.measures[test] = Measure(benchmark, self.pool, self.notes, machine=machine, sides=self.sides)
        return self.measures[test]

    def measured(self) -> dict[str, Measured]:
        """Return the measurement of each measured test by test id."""
        return {
            test: measure.measured for test, measure in self.measures.items() if measure.measured is not None
        }

    def pool(self) -> Pool:
        """Return the worker processes; the first call starts them."""
        if self._pool is None:
            sides = [Side()]
            if self.sides is not None:  # in random order: the first side of a round may meet colder caches
                sides = random.sample([self.sides.base, self.sides.candidate], 2)
            options = SetOptions(
                size=max(self._options.world_sizes),
                device=self._options.device,
                rounds=self._options.rounds,
                deadline_seconds=self._options.deadline_seconds,
                log_folder=self._options.worker_logs,
                cores=self._devices.cores(),
            )
            self._pool = Pool(
                options,
                replicates=self._replicates,
                sets_made=self._sets_made,
                sides=self._with_variables(sides),
                progress=self._progress,
                check_round=self._devices.check_round,
            )
        return self._pool

    def _with_variables(self, sides: Sequence[Side]) -> list[Side]:
        """Add environment variables for the model, the data and the output folders to each side."""
        options = self._options
        paths = {
            DATA_VARIABLE: options.data.path,
            TRACES_VARIABLE: options.traces,
            CHECKPOINTS_VARIABLE: options.checkpoints,
        }
        common = {name: str(path) for name, path in paths.items() if path is not None}
        common[MODEL_VARIABLE] = options.model
        return [replace(side, environment=common | dict(side.environment)) for side in sides]

    def notes(self, measured: Measured, fresh: bool) -> list[Note]:
        """Return the warnings about a measurement.

        fresh: whether the measurement was made just now. Warnings about the devices are then stored
        for
        the other tests that share the measurement.
        """
        key = measured.spec, tuple(sample.set for sample in measured.samples)
        if fresh:
            self._notes[key] = self._devices.warnings(measured.spec)
        return [*self._notes.get(key, []), *map(warning, other_kernels(measured))]

    @property
    def counted_seconds(self) -> float:
        """Seconds spent in timed rounds, summed over all process sets."""
        return self._pool.counted_seconds if self._pool is not None else 0.0

    def environment(self) -> dict[str, Any]:
        """Return the software versions of the ranks as JSON, or {} if no rank was started."""
        if self._pool is None:
            return {}
        return self._pool.environment() | self._devices.environment()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
