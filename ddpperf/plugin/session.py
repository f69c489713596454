"""The course of one test run, from its options to its verdict."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest.runner import runtestprotocol

from ddpperf.machine import hardware
from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.core_suite import is_below
from ddpperf.plugin.devices import Devices
from ddpperf.plugin.interrupts import ignore_interrupts
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.measuring_pass import Measuring
from ddpperf.plugin.options.options import Options
from ddpperf.plugin.options.prepare import prepare
from ddpperf.plugin.outcome_collector import Outcomes
from ddpperf.plugin.plain_run import PlainRun
from ddpperf.plugin.progress import ProgressLine
from ddpperf.plugin.stored_code import require_stored_code
from ddpperf.results.outcomes import Outcome, OutcomeKind, Verdict
from ddpperf.results.stored_runs import Baseline, NoBaseline, Storage
from ddpperf.verdict.exit_status import Answer, decide
from ddpperf.verdict.thresholds import HardwareThresholds, read_threshold_file


class Session:
    """The state of one pytest run of the performance tests.

    run: a plain run or an A/B run; measures and compares the tests.
    passes: the first measurement of all tests, and the second one of suspected regressions.
    problems: sentences that say why the run can give no verdict.
    compare_with: the name of the stored run to compare with, or True for the newest one.
    """

    def __init__(
        self,
        options: Options,
        gpus: Sequence[hardware.Gpu],
        root: Path,
        compare_with: str | Literal[True] | None = None,
    ) -> None:
        self.options = options
        self.storage = Storage(root=root, hardware_key=hardware.hardware_key(options.device, gpus))
        self.outcomes = Outcomes()
        self.problems: list[str] = []
        self.progress = ProgressLine(os.fdopen(os.dup(1), "w"))  # pytest captures the usual stream later
        self.passes: list[Measuring] = []
        self._gpus = gpus
        self._prepared = False
        thresholds, settings = read_threshold_file(root)
        self.thresholds = HardwareThresholds(thresholds, self.storage.hardware_key)
        decision = settings["gpu" if options.device == "cuda" else "cpu"]
        baseline = self._stored_run(compare_with) if compare_with else None
        self.run: PlainRun | ABRun
        if options.sides is not None and not compare_with:
            self.run = ABRun(options.sides, decision, options.device, replicates=options.replicates)
        else:
            beside = ABRun(options.sides, decision, options.device) if options.sides is not None else None
            self.run = PlainRun(options, decision, self.storage, baseline, beside)

    def _stored_run(self, name: str | Literal[True]) -> Baseline | None:
        """Load the stored run to compare with, or return None and add a problem to the session."""
        try:
            return self.storage.load(self.storage.find(name))
        except NoBaseline as problem:
            self.problems.append(str(problem))
            return None

    @cached_property
    def machine(self) -> hardware.Machine:
        """The properties of this machine, such as its GPUs and the bandwidth of its links."""
        return hardware.machine(self.options.device, self._gpus, self.options.links, self.options.world_sizes)

    @cached_property
    def _devices(self) -> Devices:
        gpus = self._gpus if self.options.device == "cuda" else ()
        return Devices(gpus, max(self.options.world_sizes))

    @property
    def is_suite(self) -> bool:
        """Whether pytest collected performance tests, or the user requested a comparison."""
        requested = isinstance(self.run, ABRun) or self.run.baseline is not None or bool(self.problems)
        return requested or self.outcomes.found_experiments

    def prepare(self) -> None:
        """Check images, interpreters and models once, before the first measurement.

        Raises Refused if something cannot be measured.
        """
        if self._prepared:
            return
        self._prepared = True
        _ = self.host  # read now: the commit at the beginning is the one that is stored
        self.options = prepare(self.options, self.storage.root)
        if self.run.baseline is not None:
            require_stored_code(self.run.baseline, self.options.sides, self.storage.root)

    @cached_property
    def host(self) -> dict[str, Any]:
        """The machine and the git commit at the start of the run, as stored in the JSON file."""
        return hardware.environment(self.options.device, self._gpus, self.storage.root)

    # --- measuring

    @property
    def measures(self) -> Mapping[str, Measure]:
        """The values of the `measure` fixture in the first measurement, by test id."""
        return self.passes[0].measures if self.passes else {}

    def start(self) -> None:
        """Lock the devices before the first test is measured.

        Raises Refused if another test run uses one of the devices.
        """
        if not self.passes:
            self.prepare()
            self._devices.acquire()
            self._begin_pass(self.run, self.run.replicates)

    def _begin_pass(self, run: PlainRun | ABRun, replicates: int) -> None:
        after = self.passes[-1] if self.passes else None
        if after is not None:
            after.close()
        self.passes.append(
            Measuring(
                self.options,
                self._devices,
                self.progress,
                sides=run.sides,
                replicates=replicates,
                after=after,
            )
        )

    def violations(self, test: str, function: str) -> list[str]:
        """Return a sentence for each metric of a test that misses its threshold."""
        measure = self.passes[-1].measures.get(test) if self.passes else None
        if measure is None or measure.measured is None:
            return []
        spec = measure.measured.spec_of(measure.judged_side)
        return self.thresholds.violations(function, spec, measure.values())

    def judge(self, items: Sequence[pytest.Item]) -> None:
        """Compare the measurements, and measure suspected regressions again in new processes."""
        (first,) = self.passes
        if not first.measured():
            return
        suspects = self.run.judge(first, self._expected())
        again = self.run.confirmation
        if not suspects or again is None:
            return
        self._begin_pass(again, again.confirmation_replicates)
        for item in items:
            if item.nodeid in suspects:
                for report in runtestprotocol(item, log=False):
                    if report.failed:  # the first pass reported everything else
                        item.ihook.pytest_runtest_logreport(report=report)
        self.run.confirm(self.passes[-1])

    def _expected(self) -> set[str]:
        """Return the ids of collected tests, and of stored tests that the command line names.

        Tests that the command line deselected are left out.
        """
        stored = self.run.baseline.measured if self.run.baseline is not None else {}
        asked = {test for test in stored if any(is_below(test, path) for path in self.outcomes.paths)}
        return set(self.outcomes.measured) | asked - self.outcomes.deselected

    def finish(self) -> None:
        """End all worker processes and release the devices, even if an error occurs."""
        ignore_interrupts()
        self.progress.close()
        try:
            for measuring in self.passes:
                measuring.close()
        finally:
            self._devices.release()

    # --- the answer

    def answer(self) -> tuple[Answer | None, Verdict]:
        """Return the result of the comparison, if any, and the verdict of the whole test run."""
        outcomes = self.outcomes_by_side()
        cannot = [test for test, outcome in outcomes.items() if outcome.kind is OutcomeKind.CANDIDATE_CANNOT]
        measured = self.passes[0].measured() if self.passes else {}
        answer = self.run.answer(measured, self._expected(), cannot)
        problems = list(self.problems)
        if self.outcomes.deselected and not self.outcomes.measured:
            count = len(self.outcomes.deselected)
            problems.append(
                f"all {count} tests were left out or deselected; --full runs the tests outside the core suite"
                if self.outcomes.left_out
                else f"all {count} tests were deselected on the command line"
            )
        return answer, decide(outcomes, measured=measured, answer=answer, problems=problems)

    def outcomes_by_side(self) -> dict[str, Outcome]:
        """Return how each test ended, and whether base or candidate of an A/B run was the cause."""
        outcomes = self.outcomes.all()
        ended_as = {
            test: measure.ended_as
            for measuring in self.passes
            for test, measure in measuring.measures.items()
            if measure.ended_as is not None
        } | dict.fromkeys(self.outcomes.candidate_cannot, OutcomeKind.CANDIDATE_CANNOT)
        for test, outcome in outcomes.items():
            kind = ended_as.get(test)
            if kind is OutcomeKind.BASE_FAILED or (kind is not None and outcome.kind is OutcomeKind.SKIPPED):
                outcomes[test] = dataclasses.replace(outcome, kind=kind)
        return outcomes

    def environment(self) -> dict[str, Any]:
        """Return hardware, commit and software versions, as stored in the JSON file of the run."""
        environment = dict(self.host)
        for measuring in self.passes:
            environment |= measuring.environment()
        return environment
