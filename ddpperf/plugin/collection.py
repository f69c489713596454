"""The tests that pytest collected, and the tests that the command line left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from ddpperf.plugin.core_suite import is_below
from ddpperf.results.outcomes import Outcome, OutcomeKind


class Collection:
    """The collected performance tests, which are the tests with the `measure` fixture, by test id.

    tests: the tests that this run measures, in the order of the test files.
    in_files: all tests in the order of the test files. Plugins may run them in another order.
    files: the test files that pytest looked into.
    uncollected: files that could not be imported.
    deselected: tests that this run does not run.
    left_out: the deselected tests that are not in the core suite.
    gate: tests that `-m gate` selects.
    recipes: the name of the training recipe of each test that has one.
    candidate_cannot: skipped tests that only the candidate of an A/B run cannot measure.
    paths: the paths of the command line, in the form of test ids; with --lf, the collected tests.
    ignores: whether the command line has --ignore or --ignore-glob.
    refusal: why the collected cases cannot be measured; empty if they can.
    """

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.in_files: list[str] = []
        self.files: set[str] = set()
        self.uncollected: dict[str, Outcome] = {}
        self.deselected: set[str] = set()
        self.left_out: list[str] = []
        self.gate: list[str] = []
        self.recipes: dict[str, str] = {}
        self.candidate_cannot: set[str] = set()
        self.paths: list[str] = []
        self.ignores = False
        self.refusal = ""

    def collect(self, items: Sequence[pytest.Item]) -> None:
        """Store which tests this run measures."""
        place = {test: number for number, test in enumerate(self.in_files)}
        tests = [item.nodeid for item in items if measures(item)]
        self.tests = sorted(tests, key=lambda test: place.get(test, len(place)))
        self.gate = [item.nodeid for item in items if item.get_closest_marker("gate")]
        self.recipes = {
            item.nodeid: str(mark.args[0]) for item in items if (mark := item.get_closest_marker("recipe"))
        }
        self.candidate_cannot = {item.nodeid for item in items if item.get_closest_marker("candidate_cannot")}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Store which test files pytest looked into, and which could not be imported."""
        self.files.add(report.nodeid)
        if report.failed:
            self.uncollected[report.nodeid] = Outcome(
                kind=OutcomeKind.NOT_COLLECTED, reason=reason_of(report)
            )

    def expected(self, stored: Iterable[str], root: Path) -> set[str]:
        """Return the collected tests, and those of the stored tests that the command line names.

        Stored tests of a file that --ignore or --ignore-glob names are left out.
        """

        def is_ignored(file: str) -> bool:
            return self.ignores and file not in self.files and (root / file).exists()

        named = {test for test in stored if any(is_below(test, path) for path in self.paths)}
        named = {test for test in named if not is_ignored(test.partition("::")[0])}
        return set(self.tests) | named - self.deselected


def measures(item: pytest.Item) -> bool:
    """Return whether a test uses the `measure` fixture."""
    return "measure" in getattr(item, "fixturenames", ())


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the first line that says why a test or a file failed or was skipped."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, message
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longreprtext).strip()
    return text.partition("\n")[0].removeprefix("Failed: ") or report.outcome
