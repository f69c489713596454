"""What became of every test, as pytest reports it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from ddpperf.results.outcomes import Outcome, OutcomeKind


class Reports:
    """Outcomes by test id, of a run's own tests, of files that could not be read, and of other tests that failed.

    deselected: own tests that the command line left out. seconds: by test, what its phases took.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.deselected: set[str] = set()
        self.uncollected: dict[str, Outcome] = {}
        self.other_failures: dict[str, Outcome] = {}
        self.seconds: dict[str, float] = {}

    def collect(self, tests: Sequence[str]) -> None:
        """Take these tests as the run's own; until they end they have not been run."""
        self.outcomes = {test: Outcome(kind=OutcomeKind.NOT_RUN) for test in tests}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how a test ended: the first of its phases that did not pass decides."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        known = self.outcomes.get(report.nodeid)
        if known is None:
            if report.failed:  # a test that measures nothing counts only then
                self.other_failures[report.nodeid] = Outcome(kind=OutcomeKind.FAILED, reason=_reason(report))
        elif known.kind in (OutcomeKind.NOT_RUN, OutcomeKind.PASSED) and (
            not report.passed or report.when == "call"
        ):
            self.outcomes[report.nodeid] = Outcome(kind=OutcomeKind(report.outcome), reason=_reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep which files could not even be read."""
        if report.failed:
            self.uncollected[report.nodeid] = Outcome(kind=OutcomeKind.NOT_COLLECTED, reason=_reason(report))

    def all(self) -> dict[str, Outcome]:
        """The run's own tests, then whatever else went wrong beside them."""
        return self.outcomes | self.uncollected | self.other_failures


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
