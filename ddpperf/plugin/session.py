"""The state of one test run, from its options to the processes that measure its tests."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, get_args

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ddpperf.doctor.all_checks import run_findings
from ddpperf.doctor.findings import Finding
from ddpperf.errors import Refused
from ddpperf.machine import hardware
from ddpperf.machine.compiler import compiler_cache
from ddpperf.machine.git import NO_COMMIT, commit
from ddpperf.machine.gpu_description import Gpu, visible_gpus
from ddpperf.machine.links import rates_to_json
from ddpperf.machine.network import find_interface
from ddpperf.plugin.base_checkout import require_stored_code
from ddpperf.plugin.collected_tests import Collection, Outcomes
from ddpperf.plugin.device_guard import Devices
from ddpperf.plugin.interrupts import ignore_interrupts
from ddpperf.plugin.measure_fixture import Measure, Measuring
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.plugin.options.benchmark_options import project_root
from ddpperf.plugin.options.options import Options, read_options
from ddpperf.plugin.options.refused_options import check_combinations, check_sides, prepare
from ddpperf.plugin.progress import ProgressLine
from ddpperf.results.outcomes import Reason
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import Baseline, NoBaseline, Storage
from ddpperf.specs import FUNCTIONS_VARIABLE, Model
from ddpperf.specs.training_step import DATA_VARIABLE
from ddpperf.verdict.thresholds import HardwareThresholds, read_threshold_file
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import LOOPBACK, Side
from ddpperf.workers.launcher import Launcher
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions


class Session:
    """The state of one pytest run of the performance tests."""

    def __init__(self, config: pytest.Config) -> None:
        """Read the options, perf/thresholds.toml and the stored run to compare with.

        Raises Refused for a wrong option or file, and for a stored run that does not exist.
        """
        gpus = visible_gpus()
        self.options = read_options(config, len(gpus))
        self.compares = bool(compare_with := config.getoption("benchmark_compare"))
        check_combinations(self.options, len(gpus), compares=self.compares)
        self.gpus = gpus if self.options.device == "cuda" else ()
        root = project_root(config)
        self.storage = storage_for(self.options, self.gpus, root)
        thresholds, settings = read_threshold_file(root)
        self.thresholds = HardwareThresholds(thresholds, self.storage.hardware_key)
        self.settings = settings["gpu" if self.options.device == "cuda" else "cpu"]
        self.collection, self.outcomes = Collection(config), Outcomes()
        self.problems: list[Reason] = []  # why the run can give no verdict
        self.baseline: Baseline | None = None  # the stored run to compare with
        try:
            if compare_with:
                self.baseline = self.storage.load(self.storage.find(compare_with))
        except NoBaseline as problem:
            if compare_with is not True:  # the newest one need not exist
                raise Refused(str(problem)) from problem
            self.problems.append(
                Reason(str(problem), "store a baseline: python -m pytest perf/ --benchmark-save=NAME")
            )
        if self.sides is not None and self.options.replicates is not None:
            self.settings = self.settings.with_sets(self.options.replicates)
        self.progress = ProgressLine()
        self.passes: list[Measuring] = []  # of all tests, then of some tests in new processes
        here = min(max(self.options.world_sizes), self.options.links.node)
        self.devices = Devices(self.gpus, here, several_nodes=self.options.nodes > 1)
        self.cleanup = ExitStack()  # releases what the run holds, after all processes have ended
        self.host: dict[str, Any] = {}  # the machine and the git commit at the start, as they are stored
        self.machine_findings: list[Finding] = []  # what the doctor found before the first measurement

    @property
    def sides(self) -> Sides | None:
        """Base and candidate of an A/B run, or None in a run that is no A/B run."""
        return None if self.compares else self.options.sides

    @cached_property
    def machine(self) -> hardware.Machine:
        """The properties of this machine, such as its GPUs and the bandwidth of its links."""
        return hardware.Machine(
            device=self.options.device,
            links=self.options.links,
            world_sizes=self.options.world_sizes,
            interface=self.options.interface,
            gpus=tuple(self.gpus),
        )

    # --- collecting

    def prepare(self) -> None:
        """Check images and models once, before cases are made of them.

        Raises Refused if something cannot be measured or stored.
        """
        if self.host:
            return
        runs = self.storage.runs
        folder = next(path for path in (runs, *runs.parents) if path.is_dir())
        if not os.access(folder, os.W_OK):
            raise Refused(f"this run would be stored in {runs}, but {folder} is read-only; make it writable")
        self.host = self._host()  # now: the commit at the beginning is the one that is stored
        self.options = prepare(self.options, self.storage.root)

    def _host(self) -> dict[str, Any]:
        return hardware.environment(self.options.device, self.gpus, self.storage.root)

    def check_sides(self, functions: Iterable[str]) -> None:
        """Check the interpreters and the code of an A/B run, before the first measurement.

        functions: of the user, which the collected tests measure. Raises Refused if ranks cannot run.
        """
        self.options = check_sides(self.options, functions)
        if self.baseline is not None and self.options.sides is not None:
            require_stored_code(self.baseline, self.options.sides, self.storage.root)

    # --- measuring

    def start(self) -> None:
        """Lock the devices, examine this machine, and wait for other nodes, before the first test.

        Raises Refused if another test run uses one of the devices, or if a node does not join.
        """
        if self.passes:
            return
        self.prepare()
        self.devices.acquire(self.cleanup)
        self.machine_findings = run_findings(self.gpus)
        alone = self.options.replicates or 1
        sets = alone if self.sides is None else self.settings.first_sets
        first = self.begin_pass(self.sides, sets, self.options.rounds)
        if self.launcher is not None:
            try:
                first.pool.live_sets()
            except SetFailure as failure:
                raise Refused(f"--launcher: {failure}") from failure

    @cached_property
    def launcher(self) -> Launcher | None:
        """The launcher that starts the ranks, or None if pytest starts them on this machine."""
        options, images = self.options, self.options.data.path
        if options.launcher is None:
            return None
        launcher = Launcher(
            template=options.launcher,
            per_node=options.links.node if options.nodes > 1 else max(options.world_sizes),
            device=options.device,
            interface=options.interface or find_interface(LOOPBACK),
            images=str(images or ""),
            key_file=Path(f".ddpperf/launch-{os.getpid()}.key"),
        )
        self.cleanup.callback(launcher.close)
        return launcher

    def begin_pass(
        self, sides: Sides | None, sets: int, rounds: int, *, time_only: bool = False
    ) -> Measuring:
        """End the old processes, and begin to measure with new process sets.

        sets: the number of process sets of this environment, or of base and candidate each. time_only:
        whether to measure only the times of the tests' own specs, in rounds as long as those of the
        first pass.
        """
        options = self.options
        self.devices.pinning.release()  # or all ranks would import torch on the controller's cores
        sets_made = 0  # the names of process sets are not used again
        if self.passes:
            self.passes[-1].pool.close()
            sets_made = self.passes[-1].pool.sets_made
        shared = SetOptions(
            size=max(options.world_sizes),
            device=options.device,
            rounds=rounds,
            deadline_seconds=options.deadline,
            log_folder=options.worker_logs,
            hang_folder=self.storage.root / ".ddpperf" / "hangs",
            cores=self.devices.pinning.ranks,
            all_cores=self.devices.cores,
            time_only=time_only,
            calls_traced=sides is None,
            launcher=self.launcher,
        )
        known = self.measured().values() if time_only else ()
        pool = Pool(
            shared,
            replicates=sets,
            sets_made=sets_made,
            sides=self._started_sides(sides, sets),
            step_seconds={measured.spec: median(measured.all_step_seconds()) for measured in known},
            progress=self.progress,
            check_round=self.devices.check_round,
            recorder=self.devices.recorder,
        )
        measuring = Measuring(pool, self.devices, self.machine, sides, self.collection.tests)
        if options.model not in get_args(Model):
            stored = self.baseline.measured if self.baseline is not None else {}
            same = {test for test, one in stored.items() if getattr(one.spec, "model", "") == options.model}
            measuring.model, measuring.known = options.model, same | self.measured().keys()
        self.passes.append(measuring)
        return measuring

    def _started_sides(self, sides: Sides | None, sets: int) -> list[Side]:
        """Return how to start the ranks: one Side, or in an A/B run the base and the candidate."""
        options = self.options
        common = {FUNCTIONS_VARIABLE: ",".join((options.model, *options.functions))}
        if options.data.path is not None:
            common[DATA_VARIABLE] = str(options.data.path)
        if sets == options.nodes == 1:
            # Several process sets, as in A/B, each compile: the compiler chooses kernels by timing them,
            # and one choice for all sets of a side could look like a change.
            common |= compiler_cache(options.device)
        started = [Side()]
        if sides is not None:  # in random order: the first side of a round may meet colder caches
            # A source that pytest-randomly does not seed: with its seed, all runs would have one order.
            started = random.SystemRandom().sample([sides.base, sides.candidate], 2)
        return [replace(side, environment=common | dict(side.environment)) for side in started]

    def fixture(self, test: str, benchmark: BenchmarkFixture, mark: Callable[[str], object]) -> Measure:
        """Return the value of the `measure` fixture for one test, and name the test in the progress line.

        mark: adds a marker to the test.
        """
        self.start()
        measuring = self.passes[-1]
        measuring.measures[test] = measure = Measure(benchmark, measuring, mark, test)
        if len(self.passes) == 1:
            self.progress.stage = f"test {len(self.measures)} of {len(self.outcomes.measured)}"
            if test in self.outcomes.repeated:
                measure.warn(f"failed at first, and was run again: {self.outcomes.repeated[test]}")
        return measure

    def violations(self, test: str, function: str) -> list[str]:
        """Return a sentence for each metric of a test that misses its threshold."""
        measured = self.measured().get(test)
        if len(self.passes) > 1 or measured is None:
            return []  # only the first measurement has the rounds that thresholds were made for
        side = self.passes[0].side
        values = self.measures[test].values_of(side)
        return self.thresholds.violations(test, function, measured.spec_of(side), values)

    def finish(self) -> None:
        """End all worker processes and release the devices, even if an error occurs."""
        ignore_interrupts()
        self.progress.close()
        with self.cleanup:
            for measuring in self.passes:
                measuring.pool.close()

    # --- what was measured

    @cached_property
    def code_changed(self) -> bool:
        """Whether tracked files have changed, or another commit was checked out, since the start."""
        return bool(self.host) and commit(self.storage.root) != self.host["commit"] != NO_COMMIT

    @property
    def measures(self) -> Mapping[str, Measure]:
        """The `measure` fixtures of the first measurement."""
        return self.passes[0].measures if self.passes else {}

    def measured(self) -> dict[str, Measured]:
        """Return the first measurement of each measured test by test id, in the order of the test files."""
        return self.passes[0].measured() if self.passes else {}

    def environment(self) -> dict[str, Any]:
        """Return hardware, commit and software versions, as stored in the JSON file of the run.

        A commit whose files have changed since the start has a "+".
        """
        environment = dict(self.host or self._host())
        if self.code_changed:
            environment["commit"] = self.host["commit"].rstrip("+") + "+"
        if not self.passes:
            return environment
        if ranks := self.passes[0].pool.environment():
            environment |= ranks | self.devices.pinning.environment()
        rates = {world_size: self.machine.link(world_size) for world_size in self.machine.world_sizes}
        if links := rates_to_json(rates):
            environment["links"] = links  # the rates that utilizations of this run refer to
        if self.launcher is not None and self.options.nodes > 1:
            here = {"link": self.launcher.interface.link, "ranks": self.launcher.per_node}
            environment["nodes"] = [node | here for node in self.launcher.hosts]
        return environment


def storage_for(options: Options, gpus: Sequence[Gpu], root: Path) -> Storage:
    """Return the storage of the runs that may be compared with runs on these devices and nodes."""
    key = hardware.hardware_key(options.device, gpus)
    if options.interface is not None:
        key = f"{options.nodes}x{key}-{options.interface.link}"
    return Storage(root=root, hardware_key=key)
