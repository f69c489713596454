"""One run of the suite: what was collected, measured and decided, from the first test to the exit status."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from _pytest.runner import runtestprotocol

from ddpperf.analysis.compare import Comparison, compare
from ddpperf.analysis.thresholds import Threshold
from ddpperf.analysis.verdict import Answer, Verdict, decide
from ddpperf.kernels import other_kernels
from ddpperf.plugin import hardware
from ddpperf.plugin.cores import Pinning
from ddpperf.plugin.device_lock import DeviceLock
from ddpperf.plugin.gate import Gate
from ddpperf.plugin.gpu_watch import GpuWatch
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options, is_experiment
from ddpperf.plugin.progress import ProgressLine
from ddpperf.plugin.reports import Reports
from ddpperf.plugin.sides import Sides
from ddpperf.plugin.storage import Baseline, NoBaseline, Storage
from ddpperf.plugin.threshold_file import read_threshold_file
from ddpperf.results import Measured
from ddpperf.specs import DATA_VARIABLE, MODEL_VARIABLE, Spec
from ddpperf.workers.pool import Pool
from ddpperf.workers.rank_process import Side


class Session:
    """The state of a run. It is one of the suite's as soon as a test that measures was collected, or deselected."""

    def __init__(
        self, options: Options, gpus: Sequence[hardware.Gpu], root: Path, compare_with: str | Literal[True] | None
    ) -> None:
        self.options = options
        self.gpus = gpus
        self.storage = Storage(root=root, hardware_key=hardware.hardware_key(options.device, gpus))
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
        self.thresholds: tuple[Threshold, ...] = ()
        self.gate: Gate | None = None
        self.sides: Sides | None = None  # that measure now: of a comparison with a stored run only in the second look
        self.applied: set[int] = set()  # the numbers of those that a test was held to
        self.begun = time.monotonic()
        self.counted_seconds = 0.0  # spent in rounds that count, by all sets
        self._pinning = Pinning()
        self._watch: GpuWatch | None = None
        self._doubts: dict[tuple[Spec, tuple[str, ...]], list[str]] = {}
        self._pool: Pool | None = None

    @property
    def active(self) -> bool:
        asked = self.compare_with or self.gate is not None  # for an answer, whatever was found to measure
        return bool(
            asked or self.reports.outcomes or self.reports.deselected or any(map(is_experiment, self.reports.uncollected))
        )

    def find_baseline(self) -> None:
        """Load what is to be compared with; a baseline that cannot be had is one of the run's problems, not its end."""
        if not self.compare_with:
            return
        try:
            self.baseline = self.storage.load(self.storage.find(self.compare_with))
        except NoBaseline as problem:
            self.problems.append(str(problem))

    def read_thresholds(self) -> None:
        """Load perf/thresholds.toml, where there is one; raises pytest.UsageError if it is broken."""
        self.thresholds, settings = read_threshold_file(self.storage.root)
        self.settings = settings["gpu" if self.options.device == "cuda" else "cpu"]
        if self.options.sides is not None:
            confirms = bool(self.compare_with)
            replicates = None if confirms else self.options.replicates
            self.gate = Gate(self.options.sides, self.settings, self.options.device, replicates, confirms=confirms)
            self.sides = None if self.compare_with else self.options.sides

    def violations(self, test: str, function: str) -> list[str]:
        """The thresholds for this hardware that the test's metrics do not reach, a sentence each."""
        measure = self.measures.get(test)
        if measure is None or measure.measured is None:
            return []
        metrics = {name: metric["value"] for name, metric in measure.metrics.items()}
        key, spec = self.storage.hardware_key, measure.measured.spec
        applying = [each for each in self.thresholds if each.applies(hardware=key, test=function, spec=spec)]
        self.applied |= {each.number for each in applying}
        return [sentence for each in applying for sentence in each.violations(metrics)]

    def start(self) -> None:
        """Take the devices, and see who else uses them; raises pytest.UsageError if another run has one."""
        used = [gpu.uuid for gpu in self.gpus[: max(self.options.world_sizes)]]
        self.lock.acquire(used if self.options.device == "cuda" else ["cpu"])
        if self.options.device == "cuda":
            self._watch = GpuWatch(used)

    def pool(self) -> Pool:
        """The process sets, made at the first measurement."""
        if self._pool is None:
            self._pinning.plan(max(self.options.world_sizes), self.gpus if self.options.device == "cuda" else ())
            sides, replicates = [Side()], self.options.replicates or 1
            if self.gate is not None and self.sides is not None:
                sides, replicates = self.gate.sides_in_any_order(), self.gate.replicates
            self._pool = Pool(
                size=max(self.options.world_sizes),
                device=self.options.device,
                rounds=self.options.rounds,
                replicates=replicates,
                deadline_seconds=self.options.deadline_seconds,
                log_folder=self.options.worker_logs,
                sides=[replace(side, environment=self._variables() | dict(side.environment)) for side in sides],
                cores=self._pinning.ranks,
                progress=self.progress,
                look=self._look,
            )
        return self._pool

    def judge_sides(self, items: Sequence[pytest.Item]) -> None:
        """After the tests: what two sides measured is judged, and the suspects' tests run again on fresh process sets."""
        if self.gate is None or not any(each.measured for each in self.measures.values()):
            return
        if self.compare_with:
            suspects = self.gate.suspects_of(self._comparison())
        else:
            suspects = self.gate.first_look(self.measures, self.pool())
        if not suspects:
            return
        first, self.measures = self.measures, {}
        self._end_pool()
        self.sides = self.options.sides
        try:
            for item in items:
                if item.nodeid in suspects:
                    for report in runtestprotocol(item, log=False):
                        if report.failed:  # what passed again was told before
                            item.ihook.pytest_runtest_logreport(report=report)
            self.gate.confirm(self.measures, self.pool)
        finally:
            self.measures = first

    def _look(self, processes: list[int], done: int) -> str:
        """Keep off the ranks' cores; see what disturbs the GPUs, and what of that spoiled the round that has just ended."""
        self._pinning.hold()
        return self._watch.look(processes, done) if self._watch is not None else ""

    def _variables(self) -> dict[str, str]:
        """What the names of data set and model mean here, for the ranks' environment."""
        path = self.options.data.path
        return {MODEL_VARIABLE: self.options.model} | ({DATA_VARIABLE: str(path)} if path is not None else {})

    def doubts(self, measured: Measured, fresh: bool) -> list[str]:
        """What made a measurement doubtful, seen from outside, and what is told of it besides; of one that was not taken now,
        what did then."""
        key = measured.spec, tuple(sample.set for sample in measured.samples)
        if fresh:
            self._doubts[key] = self._pinning.doubts(measured.spec) + (self._watch.doubts() if self._watch is not None else [])
        return self._doubts.get(key, []) + other_kernels(measured)

    def finish(self) -> None:
        """End every process and let go of the devices, whatever else goes wrong."""
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
            ending.close()

    def _comparison(self) -> Comparison | None:
        """With the stored run, if there is one."""
        if self.baseline is None:
            return None
        return compare(
            {test: each.measured for test, each in self.measures.items() if each.measured is not None},
            self.baseline.measured,
            expected=self._expected(self.baseline),
            baseline=self.baseline.path.name,
            limit=self.options.slower_ratio,
            settings=self.settings,
            history=self.storage.history(self.baseline),
        )

    def decide(self) -> tuple[Answer | None, Verdict]:
        """What the comparison says, if there is one, and the verdict, when all tests have ended."""
        measured = {test for test, each in self.measures.items() if each.measured is not None}
        comparison = self._comparison()
        answer: Answer | None = self.gate.answer(comparison) if self.gate is not None else comparison
        problems = list(self.problems)
        if self.reports.deselected and not self.reports.outcomes:
            problems.append(f"all {len(self.reports.deselected)} tests were deselected on the command line")
        return answer, decide(self.reports.all(), measured=measured, answer=answer, problems=problems)

    def _expected(self, baseline: Baseline) -> set[str]:
        """The tests to be compared: all collected ones, and the baseline's that the command line asks for by their paths."""
        asked = {
            test
            for test in baseline.measured
            if any(argument == "" or test == argument or test.startswith((f"{argument}/", f"{argument}::", f"{argument}["))
                   for argument in self.arguments)
        }  # fmt: skip
        return set(self.reports.outcomes) | asked - self.reports.deselected
