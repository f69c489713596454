"""The collected tests of a pytest run, and how each test ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from ddpperf.results.outcomes import Outcome, OutcomeKind


class Outcomes:
    """Stores whether each test of a run passed, failed or was skipped, by test id.

    measured: tests with the `measure` fixture.
    uncollected: files that could not be imported.
    other_failures: failed tests without the `measure` fixture.
    deselected: tests with the `measure` fixture that this run does not run.
    left_out: the deselected tests that are not in the core suite.
    gate: tests that `-m gate` selects.
    in_files: all tests in the order of the test files. Plugins may run them in another order.
    files: the test files that pytest looked into.
    candidate_cannot: skipped tests that only the candidate of an A/B run cannot measure.
    seconds: the duration of each test with its setup and teardown.
    repeated: for each test that another plugin ran again, why it failed before.
    paths: the paths of the command line, in the form of test ids; with --lf, the collected tests.
    refusal: why the collected cases cannot be measured; empty if they can.
    begun: the time.monotonic() value at the start of the run.
    """

    def __init__(self) -> None:
        self.measured: dict[str, Outcome] = {}
        self.uncollected: dict[str, Outcome] = {}
        self.other_failures: dict[str, Outcome] = {}
        self.deselected: set[str] = set()
        self.left_out: list[str] = []
        self.gate: list[str] = []
        self.in_files: list[str] = []
        self.files: set[str] = set()
        self.candidate_cannot: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.repeated: dict[str, str] = {}
        self.paths: list[str] = []
        self.refusal = ""
        self.begun = time.monotonic()

    def collect(self, items: Sequence[pytest.Item]) -> None:
        """Store which tests pytest collected, with the outcome "not run" until a test ends."""
        not_run = Outcome(kind=OutcomeKind.NOT_RUN)
        place = {test: number for number, test in enumerate(self.in_files)}
        tests = [item.nodeid for item in items if measures(item)]
        tests.sort(key=lambda test: place.get(test, len(place)))
        self.measured = dict.fromkeys(tests, not_run)
        self.gate = [item.nodeid for item in items if item.get_closest_marker("gate")]
        self.candidate_cannot = {item.nodeid for item in items if item.get_closest_marker("candidate_cannot")}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store whether a test passed, failed or was skipped.

        The first of setup, call and teardown that did not pass decides.
        """
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome not in ("passed", "failed", "skipped"):
            self.repeated[report.nodeid] = _reason(report)
            return  # another plugin's word, such as "rerun": the next report of the test decides
        known, decides = self.measured.get(report.nodeid), report.when == "call" or not report.passed
        outcome = Outcome(kind=OutcomeKind(report.outcome), reason=_reason(report))
        if known is None:
            if report.failed:
                self.other_failures[report.nodeid] = outcome
        elif known.kind in (OutcomeKind.NOT_RUN, OutcomeKind.PASSED) and decides:
            self.measured[report.nodeid] = outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Store which test files pytest looked into, and which could not be imported."""
        self.files.add(report.nodeid)
        if report.failed:
            self.uncollected[report.nodeid] = Outcome(kind=OutcomeKind.NOT_COLLECTED, reason=_reason(report))


def measures(item: pytest.Item) -> bool:
    """Return whether a test uses the `measure` fixture."""
    return "measure" in getattr(item, "fixturenames", ())


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, message
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longreprtext).strip()
    return text.partition("\n")[0].removeprefix("Failed: ") or report.outcome
