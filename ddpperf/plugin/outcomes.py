"""How each test of a pytest run ended, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from ddpperf.plugin.collection import reason_of
from ddpperf.results.outcomes import Outcome, OutcomeKind


class Outcomes:
    """Stores whether each test of a run passed, failed or was skipped, by test id.

    measured: tests with the `measure` fixture.
    other_failures: failed tests without the `measure` fixture.
    seconds: the duration of each test with its setup and teardown.
    repeated: for each test that another plugin ran again, why it failed before.
    begun: the time.monotonic() value at the start of the run.
    """

    def __init__(self) -> None:
        self.measured: dict[str, Outcome] = {}
        self.other_failures: dict[str, Outcome] = {}
        self.seconds: dict[str, float] = {}
        self.repeated: dict[str, str] = {}
        self.begun = time.monotonic()

    def expect(self, tests: Iterable[str]) -> None:
        """Give each test that will be measured the outcome "not run", until the test ends."""
        self.measured = dict.fromkeys(tests, Outcome(kind=OutcomeKind.NOT_RUN))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store whether a test passed, failed or was skipped.

        The first of setup, call and teardown that did not pass decides.
        """
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome not in ("passed", "failed", "skipped"):
            self.repeated[report.nodeid] = reason_of(report)
            return  # another plugin's word, such as "rerun": the next report of the test decides
        known, decides = self.measured.get(report.nodeid), report.when == "call" or not report.passed
        outcome = Outcome(kind=OutcomeKind(report.outcome), reason=reason_of(report))
        if known is None:
            if report.failed:
                self.other_failures[report.nodeid] = outcome
        elif known.kind in (OutcomeKind.NOT_RUN, OutcomeKind.PASSED) and decides:
            self.measured[report.nodeid] = outcome
