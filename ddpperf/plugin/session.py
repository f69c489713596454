"""One run of the suite: what was collected, measured and decided, from the first test to the exit status."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pytest

from ddpperf.analysis.compare import Comparison, compare
from ddpperf.analysis.verdict import Outcome, Verdict, decide
from ddpperf.plugin import hardware
from ddpperf.plugin.device_lock import DeviceLock
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options, command_line
from ddpperf.plugin.storage import SCHEMA, Baseline, NoBaseline, Storage
from ddpperf.specs import Spec
from ddpperf.workers.pool import Pool


class Session:
    """The state of a run. It is one of the suite's as soon as a test that measures was collected, or deselected."""

    def __init__(
        self, options: Options, gpus: Sequence[hardware.Gpu], root: Path, compare_with: str | Literal[True] | None
    ) -> None:
        self.options = options
        self.gpus = gpus
        self.storage = Storage(root=root, hardware_key=hardware.hardware_key(options.device, gpus))
        self.environment = hardware.environment(options.device, gpus, root)
        self.collected: list[str] = []
        self.deselected: set[str] = set()
        self.uncollected: dict[str, str] = {}
        self.arguments: list[str] = []
        self.outcomes: dict[str, Outcome] = {}
        self.measures: dict[str, Measure] = {}
        self.problems: list[str] = []
        self.baseline: Baseline | None = None
        self.compare_with = compare_with
        self.lock = DeviceLock()
        self._pool: Pool | None = None
        self._decided: tuple[Comparison | None, Verdict] | None = None

    @property
    def active(self) -> bool:
        return bool(self.collected or self.deselected or self.uncollected)

    def find_baseline(self) -> None:
        """Load what is to be compared with; a baseline that cannot be had is one of the run's problems, not its end."""
        if not self.compare_with:
            return
        try:
            self.baseline = self.storage.load(self.storage.find(self.compare_with))
        except NoBaseline as problem:
            self.problems.append(str(problem))

    def start(self) -> None:
        """Take the devices; raises pytest.UsageError if another run has one."""
        used = self.gpus[: max(self.options.world_sizes)]
        self.lock.acquire([gpu.uuid for gpu in used] if self.options.device == "cuda" else ["cpu"])

    def pool(self) -> Pool:
        """The process sets, made at the first measurement."""
        if self._pool is None:
            self._pool = Pool(
                size=max(self.options.world_sizes),
                device=self.options.device,
                rounds=self.options.rounds,
                deadline_seconds=self.options.deadline_seconds,
                log_folder=self.options.worker_logs,
            )
        return self._pool

    def notes(self, spec: Spec) -> list[str]:
        """What makes a measurement doubtful."""
        cores = hardware.core_count()
        if self.options.device == "cpu" and spec.world_size > cores:
            return [f"doubtful: {spec.world_size} ranks share {cores} cores"]
        return []

    def finish(self) -> None:
        """End every process and let go of the devices, whatever else goes wrong."""
        try:
            if self._pool is not None:
                self.environment |= self._pool.environment()
                self._pool.close()
        finally:
            self.lock.release()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how a test ended: the first of its phases that did not pass decides."""
        known = self.outcomes.get(report.nodeid)
        if report.nodeid not in self.collected or (known is not None and known.outcome != "passed"):
            return
        if not report.passed or report.when == "call":
            self.outcomes[report.nodeid] = Outcome(outcome=report.outcome, reason=_reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep which files of experiments could not even be read."""
        if report.failed and "perf" in Path(report.nodeid.split("::")[0]).parts:
            self.uncollected[report.nodeid] = f"{report.nodeid} could not be collected: {_reason(report)}"

    def decide(self) -> tuple[Comparison | None, Verdict]:
        """The comparison, if there is a baseline, and the verdict; computed once, when all tests have ended."""
        if self._decided is None:
            outcomes = {test: self.outcomes.get(test, Outcome(outcome="not run")) for test in self.collected}
            measured = {test: each.measured for test, each in self.measures.items() if each.measured is not None}
            comparison = None
            if self.baseline is not None:
                comparison = compare(
                    measured,
                    self.baseline.measured,
                    expected=self._expected(self.baseline),
                    baseline=self.baseline.path.name,
                    limit=self.options.slower_ratio,
                )
            verdict = decide(
                outcomes,
                measured=measured,
                comparison=comparison,
                problems=[*self.uncollected.values(), *self.problems],
            )
            self._decided = comparison, verdict
        return self._decided

    def _expected(self, baseline: Baseline) -> set[str]:
        """The tests to be compared: all collected ones, and the baseline's that the command line asks for by their paths."""
        asked = {
            test
            for test in baseline.measured
            if any(argument == "" or test == argument or test.startswith((f"{argument}/", f"{argument}::", f"{argument}["))
                   for argument in self.arguments)
        }  # fmt: skip
        return set(self.collected) | asked - self.deselected

    def header(self) -> dict[str, Any]:
        """The run's own part of the JSON, beside pytest-benchmark's."""
        _, verdict = self.decide()
        return {
            "schema": SCHEMA,
            "hardware_key": self.storage.hardware_key,
            "environment": self.environment,
            "options": {
                "command_line": command_line(),
                **asdict(self.options),
                "worker_logs": self.options.worker_logs and str(self.options.worker_logs),
            },
            "outcomes": {test: asdict(self.outcomes.get(test, Outcome(outcome="not run"))) for test in self.collected},
            "verdict": asdict(verdict),
        }


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of why a test did not pass."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    with contextlib.suppress(IndexError):
        text = str(crash.message if crash is not None else report.longreprtext).strip()
        return text.splitlines()[0].removeprefix("Failed: ")
    return report.outcome
