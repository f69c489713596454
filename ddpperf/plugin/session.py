"""One run of the suite: what was collected, measured and decided, from the first test to the exit status."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest.runner import runtestprotocol

from ddpperf.instruments.kernels import other_kernels
from ddpperf.machine import hardware
from ddpperf.machine.cores import Pinning
from ddpperf.machine.device_lock import DeviceLock
from ddpperf.machine.gpu_watch import GpuWatch
from ddpperf.plugin.ab_run import Gate
from ddpperf.plugin.controls import StoredControls
from ddpperf.plugin.interrupts import ignore_interrupts
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options, is_experiment
from ddpperf.plugin.options.sides import Sides
from ddpperf.plugin.outcomes import Reports
from ddpperf.plugin.progress import ProgressLine
from ddpperf.plugin.stored_code import require_stored_code
from ddpperf.results.notes import Note, warning
from ddpperf.results.outcomes import Outcome, OutcomeKind, Verdict
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import Baseline, NoBaseline, PastRun, Storage
from ddpperf.specs import CHECKPOINTS_VARIABLE, DATA_VARIABLE, MODEL_VARIABLE, TRACES_VARIABLE, Spec
from ddpperf.verdict.stored_run import Comparison, compare, copies
from ddpperf.verdict.thresholds import HardwareThresholds, read_threshold_file
from ddpperf.verdict.verdict import Answer, decide
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool


class Session:
    """The state of a run. It is one of the suite's as soon as a test that measures was collected, or deselected."""

    def __init__(
        self,
        options: Options,
        gpus: Sequence[hardware.Gpu],
        root: Path,
        compare_with: str | Literal[True] | None,
    ) -> None:
        self.options = options
        self.gpus = gpus
        self.storage = Storage(root=root, hardware_key=hardware.hardware_key(options.device, gpus))
        self.machine = hardware.machine(options.device, gpus, options.links, options.world_sizes)
        self.environment = hardware.environment(options.device, gpus, root)
        self.reports = Reports()
        self.in_gate: list[str] = []
        self.arguments: list[str] = []
        self.measures: dict[str, Measure] = {}
        self.problems: list[str] = []
        self.refusals: list[str] = []
        self.baseline: Baseline | None = None
        self.compare_with = compare_with
        self.command_line = ""
        self.lock = DeviceLock()
        self.progress = ProgressLine(os.fdopen(os.dup(1), "w"))  # before pytest captures what goes there
        self.controls = StoredControls(options.device)
        self.comparison: Comparison | None = None
        self.gate: Gate | None = None
        self.candidate_cannot: set[str] = set()  # tests skipped when they were collected
        self.base_failed: set[str] = set()  # tests whose second look the base's ranks ended
        self.begun = time.monotonic()
        self.counted_seconds = 0.0  # spent in rounds that count, by all sets
        self._pinning = Pinning()
        self._watch: GpuWatch | None = None
        self._warnings: dict[tuple[Spec, tuple[str, ...]], list[Note]] = {}
        self._pool: Pool | None = None
        self._sets_made = 0  # by earlier pools: a set's name, and its files, are its own

    @property
    def active(self) -> bool:
        asked = self.compare_with or self.gate is not None  # for an answer, whatever was found to measure
        return bool(
            asked
            or self.reports.outcomes
            or self.reports.deselected
            or any(map(is_experiment, self.reports.uncollected))
        )

    def find_baseline(self) -> None:
        """Load what is to be compared with; one that cannot be had is one of the run's problems, not its end. Raises
        pytest.UsageError for a base that is not its code."""
        if not self.compare_with:
            return
        try:
            self.baseline = self.storage.load(self.storage.find(self.compare_with))
        except NoBaseline as problem:
            self.problems.append(str(problem))
        else:
            require_stored_code(self.baseline, self.options.sides, self.storage.root)

    def read_thresholds(self) -> None:
        """Load perf/thresholds.toml, where there is one; raises Refused if it is broken."""
        thresholds, settings = read_threshold_file(self.storage.root)
        self.thresholds = HardwareThresholds(thresholds, self.storage.hardware_key)
        self.settings = settings["gpu" if self.options.device == "cuda" else "cpu"]
        if self.options.sides is not None:
            replicates = None if (confirms := bool(self.compare_with)) else self.options.replicates
            self.gate = Gate(
                self.options.sides, self.settings, self.options.device, replicates, confirms=confirms
            )

    @property
    def sides(self) -> Sides | None:
        """Those that measure now: of a comparison with a stored run only in the second look."""
        return self.gate.sides if self.gate is not None and self.gate.active else None

    def violations(self, test: str, function: str) -> list[str]:
        """The thresholds for this hardware that the test's metrics do not reach, a sentence each."""
        measure = self.measures.get(test)
        if measure is None or measure.measured is None:
            return []
        return self.thresholds.violations(
            function, measure.measured.spec_of(measure.judged), measure.values()
        )

    def start(self) -> None:
        """Take the devices, and see who else uses them; raises pytest.UsageError if another run has one."""
        used = [gpu.uuid for gpu in self.gpus[: max(self.options.world_sizes)]]
        self.lock.acquire(used if self.options.device == "cuda" else ["cpu"])
        if self.options.device == "cuda":
            self._watch = GpuWatch(used)

    def pool(self) -> Pool:
        """The process sets, made at the first measurement."""
        if self._pool is None:
            self._pinning.plan(
                max(self.options.world_sizes), self.gpus if self.options.device == "cuda" else ()
            )
            sides, replicates = [Side()], self.options.replicates or 1
            if self.gate is not None and self.gate.active:
                sides, replicates = self.gate.sides_in_any_order(), self.gate.replicates
            self._pool = Pool(
                size=max(self.options.world_sizes),
                device=self.options.device,
                rounds=self.options.rounds,
                replicates=replicates,
                sets_made=self._sets_made,
                deadline_seconds=self.options.deadline_seconds,
                log_folder=self.options.worker_logs,
                sides=[
                    replace(side, environment=self._variables() | dict(side.environment)) for side in sides
                ],
                cores=self._pinning.ranks,
                progress=self.progress,
                check_round=self._look,
            )
        return self._pool

    def judge(self, items: Sequence[pytest.Item]) -> None:
        """After the tests: controls, then what two sides measured, the suspects' tests once more on fresh process sets."""
        measured = self._measured()
        if not measured:
            return
        if self.gate is not None and self.gate.active:
            suspects = self.gate.screening(self.measures, self.pool())
        else:
            self.controls.copy(self.pool())
            comparison = self._comparison()
            if comparison is not None:
                self.controls.slow_down(comparison, measured, self.pool())
            suspects = self.gate.suspects_of(comparison) if self.gate is not None else []
        if self.gate is None or not suspects:
            return
        first, self.measures = self.measures, {}
        self._end_pool()
        self.gate.active = True
        try:
            for item in items:
                if item.nodeid in suspects:
                    for report in runtestprotocol(item, log=False):
                        if report.failed:  # what passed again was told before
                            item.ihook.pytest_runtest_logreport(report=report)
            self.gate.confirm(self.measures, self.pool)
        finally:
            self.base_failed |= {test for test, each in self.measures.items() if each.base_failed}
            self.measures = first

    def _look(self, processes: list[int], done: int) -> str:
        """Keep off the ranks' cores; see what disturbs the GPUs, and what of that spoiled the round that has just ended."""
        self._pinning.hold()
        return self._watch.look(processes, done) if self._watch is not None else ""

    def _variables(self) -> dict[str, str]:
        """For the ranks' environment: what the names of data set and model mean here, and where traces stay."""
        options = self.options
        paths = {
            DATA_VARIABLE: options.data.path,
            TRACES_VARIABLE: options.traces,
            CHECKPOINTS_VARIABLE: options.checkpoints,
        }
        return {MODEL_VARIABLE: options.model} | {
            name: str(path) for name, path in paths.items() if path is not None
        }

    def warnings(self, measured: Measured, fresh: bool) -> list[Note]:
        """What made a measurement doubtful, seen from outside, and what is told of it besides; of one that was not taken now,
        what did then."""
        key = measured.spec, tuple(sample.set for sample in measured.samples)
        if fresh:
            self._warnings[key] = [
                *map(warning, self._pinning.warnings(measured.spec)),
                *(self._watch.warnings() if self._watch is not None else []),
            ]
        return [*self._warnings.get(key, []), *map(warning, other_kernels(measured))]

    def finish(self) -> None:
        """End every process and let go of the devices, whatever else goes wrong."""
        ignore_interrupts()
        self.progress.close()
        try:
            self._end_pool()
        finally:
            self._pinning.release()
            self.lock.release()

    def _end_pool(self) -> None:
        if self._pool is not None:
            ending, self._pool = self._pool, None
            self.environment |= ending.environment() | self._pinning.environment()
            self.counted_seconds += ending.counted_seconds
            self._sets_made = ending.sets_made
            ending.close()

    def _comparison(self) -> Comparison | None:
        """With the stored run, if there is one."""
        if (baseline := self.baseline) is None:
            return None
        common: dict[str, Any] = {"baseline": baseline.path.name, "limit": self.options.slower_ratio}
        common |= {"settings": self.settings, "history": self._history}
        compared = compare(self._measured(), baseline.measured, expected=self._expected(baseline), **common)
        negative = copies(self.controls.copied, baseline.copied, compared=len(compared.changes), **common)
        return replace(compared, controls=self.controls.beside(negative))

    @cached_property
    def _history(self) -> list[PastRun]:
        return self.storage.history(self.baseline) if self.baseline is not None else []

    def _measured(self) -> dict[str, Measured]:
        return {test: each.measured for test, each in self.measures.items() if each.measured is not None}

    def outcomes(self) -> dict[str, Outcome]:
        """Return how each test ended, with the failures and skips that only one side of an A/B run caused told apart."""
        failed = self.base_failed | {test for test, each in self.measures.items() if each.base_failed}
        cannot = self.candidate_cannot | {
            test for test, each in self.measures.items() if each.candidate_cannot
        }
        outcomes = self.reports.all()
        for test, outcome in outcomes.items():
            if test in failed:
                outcomes[test] = replace(outcome, kind=OutcomeKind.BASE_FAILED)
            elif outcome.kind is OutcomeKind.SKIPPED and test in cannot:
                outcomes[test] = replace(outcome, kind=OutcomeKind.CANDIDATE_CANNOT)
        return outcomes

    def decide(self) -> tuple[Answer | None, Verdict]:
        """What the comparison says, if there is one, and the verdict, when all tests have ended."""
        self.comparison = comparison = self._comparison()
        outcomes = self.outcomes()
        unmeasured = [test for test, each in outcomes.items() if each.kind is OutcomeKind.CANDIDATE_CANNOT]
        answer: Answer | None = (
            self.gate.answer(comparison, unmeasured) if self.gate is not None else comparison
        )
        problems = list(self.problems)
        if self.reports.deselected and not self.reports.outcomes:
            problems.append(f"all {len(self.reports.deselected)} tests were deselected on the command line")
        return answer, decide(outcomes, measured=self._measured(), answer=answer, problems=problems)

    def _expected(self, baseline: Baseline) -> set[str]:
        """The tests to be compared: all collected ones, and the baseline's that the command line asks for by their paths."""
        asked = {
            test
            for test in baseline.measured
            if any(argument == "" or test == argument or test.startswith((f"{argument}/", f"{argument}::", f"{argument}["))
                   for argument in self.arguments)
        }  # fmt: skip
        return set(self.reports.outcomes) | asked - self.reports.deselected
