"""One run of the suite: what was collected, measured and decided, from the first test to the exit status."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from _pytest.runner import runtestprotocol

from ddpperf.analysis.compare import compare
from ddpperf.analysis.thresholds import Threshold
from ddpperf.analysis.verdict import Answer, Outcome, Verdict, decide
from ddpperf.plugin import hardware
from ddpperf.plugin.cores import Pinning
from ddpperf.plugin.device_lock import DeviceLock
from ddpperf.plugin.gate import Gate
from ddpperf.plugin.gpu_watch import GpuWatch
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options, is_experiment
from ddpperf.plugin.progress import ProgressLine
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
        self.outcomes: dict[str, Outcome] = {}
        self.deselected: set[str] = set()
        self.uncollected: dict[str, Outcome] = {}
        self.other_failures: dict[str, Outcome] = {}
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
        self.applied: set[int] = set()  # the numbers of those that a test was held to
        self.begun = time.monotonic()
        self.test_seconds: dict[str, float] = {}
        self.counted_seconds = 0.0  # spent in rounds that count, by all sets
        self._pinning = Pinning()
        self._watch: GpuWatch | None = None
        self._doubts: dict[tuple[Spec, tuple[str, ...]], list[str]] = {}
        self._pool: Pool | None = None

    @property
    def active(self) -> bool:
        return bool(self.outcomes or self.deselected or any(map(is_experiment, self.uncollected)))

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
        if self.options.sides is not None:
            hardware_class = "gpu" if self.options.device == "cuda" else "cpu"
            self.gate = Gate(self.options.sides, settings[hardware_class], self.options.device, self.options.replicates)

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
            if self.gate is not None:
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
        if self.gate is None or not self.measures:
            return
        suspects = self.gate.first_look(self.measures, self.pool())
        if not suspects:
            return
        first, self.measures = self.measures, {}
        self._end_pool()
        try:
            for item in items:
                if item.nodeid in suspects:
                    for report in runtestprotocol(item, log=False):
                        if report.failed:  # what passed again was told before
                            item.ihook.pytest_runtest_logreport(report=report)
            self.gate.confirm(self.measures)
        finally:
            self.measures = first

    def _look(self, processes: list[int], done: int) -> None:
        """Keep off the ranks' cores; see what disturbs the GPUs; what did before the first round is of no interest."""
        self._pinning.hold()
        if self._watch is not None:
            self._watch.look(processes)
            if not done:
                self._watch.doubts()

    def _variables(self) -> dict[str, str]:
        """What the names of data set and model mean here, for the ranks' environment."""
        path = self.options.data.path
        return {MODEL_VARIABLE: self.options.model} | ({DATA_VARIABLE: str(path)} if path is not None else {})

    def doubts(self, measured: Measured, fresh: bool) -> list[str]:
        """What made a measurement doubtful, seen from outside; of one that was not taken now, what did then."""
        key = measured.spec, tuple(sample.set for sample in measured.samples)
        if fresh:
            self._doubts[key] = self._pinning.doubts(measured.spec) + (self._watch.doubts() if self._watch is not None else [])
        return self._doubts.get(key, [])

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

    def collect(self, tests: Sequence[str]) -> None:
        """Take these tests as the run's own; until they end they have not been run."""
        self.outcomes = {test: Outcome(outcome="not run") for test in tests}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how a test ended: the first of its phases that did not pass decides."""
        self.test_seconds[report.nodeid] = self.test_seconds.get(report.nodeid, 0.0) + report.duration
        known = self.outcomes.get(report.nodeid)
        if known is None:
            if report.failed:  # a test that measures nothing counts only then
                self.other_failures[report.nodeid] = Outcome(outcome="failed", reason=_reason(report))
        elif known.outcome in ("not run", "passed") and (not report.passed or report.when == "call"):
            self.outcomes[report.nodeid] = Outcome(outcome=report.outcome, reason=_reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep which files could not even be read."""
        if report.failed:
            self.uncollected[report.nodeid] = Outcome(outcome="not collected", reason=_reason(report))

    def decide(self) -> tuple[Answer | None, Verdict]:
        """What the comparison says, if there is one, and the verdict, when all tests have ended."""
        measured = {test: each.measured for test, each in self.measures.items() if each.measured is not None}
        answer: Answer | None = self.gate.judgement() if self.gate is not None else None
        if self.baseline is not None:
            answer = compare(
                measured,
                self.baseline.measured,
                expected=self._expected(self.baseline),
                baseline=self.baseline.path.name,
                limit=self.options.slower_ratio,
            )
        problems = list(self.problems)
        if self.deselected and not self.outcomes:
            problems.append(f"all {len(self.deselected)} tests were deselected on the command line")
        return answer, decide(self.all_outcomes(), measured=measured, answer=answer, problems=problems)

    def all_outcomes(self) -> dict[str, Outcome]:
        """The run's own tests, then whatever else went wrong beside them."""
        return self.outcomes | self.uncollected | self.other_failures

    def _expected(self, baseline: Baseline) -> set[str]:
        """The tests to be compared: all collected ones, and the baseline's that the command line asks for by their paths."""
        asked = {
            test
            for test in baseline.measured
            if any(argument == "" or test == argument or test.startswith((f"{argument}/", f"{argument}::", f"{argument}["))
                   for argument in self.arguments)
        }  # fmt: skip
        return set(self.outcomes) | asked - self.deselected


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of why a test did not pass."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    with contextlib.suppress(IndexError):
        text = str(crash.message if crash is not None else report.longreprtext).strip()
        return text.splitlines()[0].removeprefix("Failed: ")
    return report.outcome
