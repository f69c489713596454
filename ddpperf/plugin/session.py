"""The course of one test run, from its options to its verdict."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from ddpperf.doctor.all_checks import run_findings
from ddpperf.doctor.findings import Finding
from ddpperf.errors import Refused
from ddpperf.machine import hardware
from ddpperf.machine.compiler import compiler_cache
from ddpperf.machine.links import rates_to_json
from ddpperf.machine.network import find_interface
from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.base_checkout import require_stored_code
from ddpperf.plugin.collected_tests import Collection, Outcomes
from ddpperf.plugin.devices import Devices
from ddpperf.plugin.interrupts import ignore_interrupts
from ddpperf.plugin.measure_fixture import Measure, Measuring
from ddpperf.plugin.options.options import Options, is_experiment
from ddpperf.plugin.options.slow_checks import prepare, with_functions
from ddpperf.plugin.plain_run import PlainRun
from ddpperf.plugin.progress import ProgressLine
from ddpperf.plugin.run_inputs import RunInputs
from ddpperf.results.outcomes import Outcome, OutcomeKind, Verdict
from ddpperf.results.samples import Measured
from ddpperf.specs import DATA_VARIABLE, FUNCTIONS_VARIABLE
from ddpperf.verdict.exit_status import Answer, decide
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import LOOPBACK, Side
from ddpperf.workers.launcher import Launcher
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions


class Session:
    """The state of one pytest run of the performance tests.

    run: a plain run or an A/B run; compares the measurements of the tests.
    passes: the first measurement of all tests, and later ones of some tests in new processes.
    problems: sentences that say why the run can give no verdict.
    cleanup: releases what the run holds. It is closed when all processes have ended.
    host: the machine and the git commit at the start of the run, as stored in the JSON file.
    machine_findings: what may spoil the measurements, as the doctor found before the first one.
    """

    def __init__(self, options: Options, inputs: RunInputs) -> None:
        self.options = options
        self.inputs = inputs
        self.collection = Collection()
        self.outcomes = Outcomes()
        self.problems = [inputs.no_baseline] if inputs.no_baseline else []
        self.progress = ProgressLine()
        self.passes: list[Measuring] = []
        most, several = max(options.world_sizes), options.nodes.count > 1
        self.devices = Devices(
            inputs.gpus if options.device == "cuda" else (),
            min(most, options.nodes.size) if several else most,
            several_nodes=several,
        )
        self.cleanup = ExitStack()
        self.host: dict[str, Any] = {}
        self.machine_findings: list[Finding] = []
        self.run: PlainRun | ABRun
        if options.sides is None or inputs.baseline is not None or inputs.no_baseline:
            self.run = PlainRun(options, inputs)
        else:
            settings = inputs.settings
            if options.replicates is not None:
                settings = settings.with_sets(options.replicates)
            self.run = ABRun(options.sides, settings, options.device, rounds=options.rounds)

    @cached_property
    def machine(self) -> hardware.Machine:
        """The properties of this machine, such as its GPUs and the bandwidth of its links."""
        options = self.options
        gpus = self.inputs.gpus if options.device == "cuda" else ()
        return hardware.Machine(
            device=options.device,
            links=options.links,
            world_sizes=options.world_sizes,
            unmapped=hardware.first_unmapped(gpus),
            interface=options.nodes.interface,
            gpus=tuple(gpus),
        )

    @property
    def is_suite(self) -> bool:
        """Whether the run needs a verdict.

        It needs none if the command line left all performance tests out, and other tests ran.
        """
        requested = isinstance(self.run, ABRun) or self.inputs.baseline is not None or bool(self.problems)
        found = self.outcomes.measured or (self.collection.deselected and not self.outcomes.seconds)
        return requested or bool(found) or any(map(is_experiment, self.collection.uncollected))

    def measured(self) -> dict[str, Measured]:
        """Return the first measurement of each measured test by test id."""
        return self.passes[0].measured() if self.passes else {}

    def prepare(self) -> None:
        """Check images, interpreters and models once, before the first measurement.

        Raises Refused if something cannot be measured.
        """
        if self.host:
            return
        self.host = self._host()  # now: the commit at the beginning is the one that is stored
        self.options = prepare(self.options, self.inputs.storage.root)
        if self.inputs.baseline is not None:
            require_stored_code(self.inputs.baseline, self.options.sides, self.inputs.storage.root)

    def _host(self) -> dict[str, Any]:
        return hardware.environment(self.options.device, self.inputs.gpus, self.inputs.storage.root)

    def use_functions(self, functions: Iterable[str]) -> None:
        """Let the ranks import the user's functions that the collected tests measure.

        Raises Refused if a side of an A/B run would load nothing from its source tree.
        """
        self.options = with_functions(self.options, functions)

    # --- measuring

    @property
    def measures(self) -> Mapping[str, Measure]:
        """The values of the `measure` fixture in the first measurement, by test id."""
        return self.passes[0].measures if self.passes else {}

    def start(self) -> None:
        """Lock the devices, examine this machine, and wait for other nodes, before the first test.

        Raises Refused if another test run uses one of the devices, or if a node does not join.
        """
        if self.passes:
            return
        self.prepare()
        self.cleanup.callback(self.devices.release)
        self.devices.acquire()
        self.machine_findings = run_findings(self.options.device, self.inputs.gpus)
        self.begin_pass(self.run, self.run.replicates)
        if self.launcher is not None:
            try:
                self.passes[0].pool.live_sets()
            except SetFailure as failure:
                raise Refused(f"--launcher: {failure}") from failure

    @cached_property
    def launcher(self) -> Launcher | None:
        """What starts the ranks; None if they start on this machine."""
        nodes, images = self.options.nodes, self.options.data.path
        if nodes.launcher is None:
            return None
        launcher = Launcher(
            template=nodes.launcher,
            nodes=nodes.count,
            per_node=nodes.size if nodes.count > 1 else max(self.options.world_sizes),
            device=self.options.device,
            interface=nodes.interface or find_interface(LOOPBACK),
            images=str(images.absolute()) if images is not None else "",
            key_file=Path(f".ddpperf/launch-{os.getpid()}.key"),
        )
        self.cleanup.callback(launcher.close)
        return launcher

    def fixture(self, test: str, benchmark: BenchmarkFixture) -> Measure:
        """Return the value of the `measure` fixture for one test, and name the test in the progress line."""
        self.start()
        measure = self.passes[-1].fixture(test, benchmark, self.machine)
        if len(self.passes) == 1:
            self.progress.stage = f"test {len(self.measures)} of {len(self.outcomes.measured)}"
            if test in self.outcomes.repeated:
                measure.warn(f"failed at first, and was run again: {self.outcomes.repeated[test]}")
        return measure

    def begin_pass(self, run: PlainRun | ABRun, replicates: int) -> None:
        """End the old processes, and begin to measure with `replicates` new process sets per side.

        An A/B run that confirms a comparison measures only the times of the tests' own specs, in
        rounds as long as those of the first pass.
        """
        options, time_only = self.options, run is not self.run
        sets_made = 0  # the names of process sets are not used again
        if self.passes:
            self.passes[-1].pool.close()
            sets_made = self.passes[-1].pool.sets_made
        known = self.passes[0].measured().values() if time_only else ()
        shared = SetOptions(
            size=max(options.world_sizes),
            device=options.device,
            rounds=run.rounds,
            deadline_seconds=options.deadline_seconds,
            log_folder=options.worker_logs,
            hang_folder=self.inputs.storage.root / ".ddpperf" / "hangs",
            cores=self.devices.cores(),
            time_only=time_only,
            launcher=self.launcher,
        )
        pool = Pool(
            shared,
            replicates=replicates,
            sets_made=sets_made,
            sides=self._sides(run, replicates),
            step_seconds={measured.spec: median(measured.all_step_seconds()) for measured in known},
            progress=self.progress,
            check_round=self.devices.check_round,
            recorder=self.devices.recorder,
        )
        self.passes.append(Measuring(pool, self.devices, run.sides, order=list(self.outcomes.measured)))

    def _sides(self, run: PlainRun | ABRun, replicates: int) -> list[Side]:
        """Return the interpreters and variables of the ranks, of base and candidate in an A/B run."""
        options = self.options
        common = {FUNCTIONS_VARIABLE: ",".join((options.model, *options.functions))}
        if options.data.path is not None:
            common[DATA_VARIABLE] = str(options.data.path.absolute())  # other nodes run in other folders
        if replicates == options.nodes.count == 1:
            # Several process sets, as in A/B, each compile: the compiler chooses kernels by timing them,
            # and one choice for all sets of a side could look like a change.
            common |= compiler_cache(options.device)
        sides = [Side()]
        if run.sides is not None:  # in random order: the first side of a round may meet colder caches
            # A source that pytest-randomly does not seed: with its seed, all runs would have one order.
            sides = random.SystemRandom().sample([run.sides.base, run.sides.candidate], 2)
        return [
            replace(
                side, environment=common | dict(side.environment), root=side.root and side.root.absolute()
            )
            for side in sides
        ]

    def violations(self, test: str, function: str) -> list[str]:
        """Return a sentence for each metric of a test that misses its threshold."""
        measure = self.measures.get(test)
        if len(self.passes) > 1 or measure is None or measure.record.measured is None:
            return []  # only the first measurement has the rounds that thresholds were made for
        spec = measure.record.measured.spec_of(measure.judged_side)
        return self.inputs.thresholds.violations(test, function, spec, measure.values())

    def expected(self) -> set[str]:
        """Return the ids of collected tests, and of stored tests that the command line names."""
        stored = self.inputs.baseline.measured if self.inputs.baseline is not None else ()
        return self.collection.expected(stored, self.inputs.storage.root)

    def finish(self) -> None:
        """End all worker processes and release the devices, even if an error occurs."""
        ignore_interrupts()
        self.progress.close()
        with self.cleanup:
            for measuring in self.passes:
                measuring.pool.close()

    # --- the answer

    def answer(self) -> tuple[Answer | None, Verdict]:
        """Return the result of the comparison, if any, and the verdict of the whole test run."""
        outcomes, measured, problems = self.outcomes_by_side(), self.measured(), list(self.problems)
        answer: Answer | None
        if isinstance(self.run, ABRun):
            cannot = OutcomeKind.CANDIDATE_CANNOT
            answer = self.run.answer([test for test, outcome in outcomes.items() if outcome.kind is cannot])
        else:
            answer = self.run.answer(measured, self.expected(), self.environment())
        if (count := len(self.collection.deselected)) and not self.outcomes.measured:
            how = "were deselected on the command line"
            if self.collection.left_out:
                how = "were left out or deselected; --full runs the tests outside the core suite"
            problems.append(f"all {count} tests {how}")
        return answer, decide(outcomes, measured=measured, answer=answer, problems=problems)

    def outcomes_by_side(self) -> dict[str, Outcome]:
        """Return how each test ended, and whether base or candidate of an A/B run was the cause."""
        found = self.outcomes
        outcomes = found.measured | self.collection.uncollected | found.other_failures
        ended_as = dict.fromkeys(self.collection.candidate_cannot, OutcomeKind.CANDIDATE_CANNOT)
        for measuring in self.passes:
            for test, measure in measuring.measures.items():
                if measure.ended_as is not None:
                    ended_as[test] = measure.ended_as
        for test, outcome in outcomes.items():
            kind = ended_as.get(test)
            if kind is OutcomeKind.BASE_FAILED or (kind is not None and outcome.kind is OutcomeKind.SKIPPED):
                outcomes[test] = replace(outcome, kind=kind)
        return outcomes

    def environment(self) -> dict[str, Any]:
        """Return hardware, commit and software versions, as stored in the JSON file of the run."""
        environment = dict(self.host or self._host())
        if not self.passes:
            return environment
        if ranks := self.passes[0].pool.environment():
            environment |= ranks | self.devices.pinning.environment()
        rates = {world_size: self.machine.link(world_size) for world_size in self.machine.world_sizes}
        if links := rates_to_json(rates):
            environment["links"] = links  # the rates that utilizations of this run refer to
        if self.launcher is not None and self.launcher.nodes > 1:
            here = {"link": self.launcher.interface.link, "ranks": self.launcher.per_node}
            environment["nodes"] = [node | here for node in self.launcher.hosts]
        return environment
