"""The tests that pytest collected, which of them a run leaves out, and how each ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.compat import NOTSET

from ddpperf.results.outcomes import Outcome, OutcomeKind


class Collection:
    """The collected performance tests, which are the tests with the `measure` fixture, by test id."""

    def __init__(self, config: pytest.Config) -> None:
        self.tests: list[str] = []  # that this run measures, in the order of the test files
        self.uncollected: dict[str, Outcome] = {}  # files that could not be imported
        self.deselected: set[str] = set()
        self.left_out: list[str] = []  # the tests outside the core suite, of those
        self.refusal = ""  # why the collected cases cannot be measured
        self.recipes: dict[str, str] = {}  # the name of the training recipe of each test that has one
        self._config = config
        self._in_files: list[str] = []  # all tests in their order. Plugins may run them in another one.
        self._files: set[str] = set()  # that pytest looked into

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Store which test files pytest collected, and which could not be imported."""
        self._files.add(report.nodeid)
        if report.failed:
            failed = Outcome(kind=OutcomeKind.NOT_COLLECTED, reason=_reason_of(report))
            self.uncollected[report.nodeid] = failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Remove tests for which the options leave no case, and tests that this run leaves out.

        Tests outside the core suite are left out, unless the command line names their file or has -m.
        """
        self._in_files = [item.nodeid for item in items]
        yield
        items[:] = [item for item in items if spec_of(item) is not NOTSET]
        option = self._config.getoption
        named = [path for path in self._paths() if path.partition("::")[0].endswith(".py")]
        if not option("--full") and not option("markexpr"):
            slow = [
                item for item in items if {"specs", "slow"} <= {mark.name for mark in item.iter_markers()}
            ]
            slow = [item for item in slow if not any(_is_below(item.nodeid, path) for path in named)]
            self.left_out = [item.nodeid for item in slow]
        skips = option("benchmark_skip") and not option("benchmark_only")
        left_out = [item for item in items if item.nodeid in self.left_out or (skips and measures(item))]
        if left_out:
            self._config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected.update(item.nodeid for item in items if measures(item))

    def collect(self, items: Sequence[pytest.Item]) -> None:
        """Store which tests this run measures, after plugins such as --lf have removed tests."""
        tests = {item.nodeid for item in items if measures(item)}
        self.tests = [test for test in self._in_files if test in tests]
        for item in items:
            if (recipe := item.get_closest_marker("recipe")) is not None:
                self.recipes[item.nodeid] = str(recipe.args[0])

    def expected(self, stored: Iterable[str]) -> set[str]:
        """Return the collected tests, and the stored tests that the command line names.

        Stored tests of a file that --ignore or --ignore-glob names are left out. With --lf, stored tests
        are expected only if they were collected, because --lf does not report which tests it leaves out.
        """
        option, root = self._config.getoption, self._config.rootpath
        ignores = option("ignore") or option("ignore_glob")
        paths = self.tests if option("lf", False) else self._paths()

        def is_ignored(file: str) -> bool:
            return ignores and file not in self._files and (root / file).exists()

        named = {test for test in stored if any(_is_below(test, path) for path in paths)}
        named = {test for test in named if not is_ignored(test.partition("::")[0])}
        return set(self.tests) | named - self.deselected

    def _paths(self) -> list[str]:
        """Return the paths of the command line, relative to the root as in test ids; "" is the root."""
        found = []
        for argument in self._config.args:
            path, *rest = argument.split("::", 1)
            relative = os.path.relpath(self._config.invocation_params.dir / path, self._config.rootpath)
            found.append("::".join(["" if relative == "." else Path(relative).as_posix(), *rest]))
        return found


class Outcomes:
    """Whether each test of a run passed, failed or was skipped, by test id."""

    def __init__(self) -> None:
        self.measured: dict[str, Outcome] = {}  # tests with the `measure` fixture
        self.other_failures: dict[str, Outcome] = {}  # failed tests without it
        self.seconds: dict[str, float] = {}  # with setup and teardown
        self.repeated: dict[str, str] = {}  # why tests failed that another plugin ran again
        self.begun = time.monotonic()

    def expect(self, tests: Iterable[str]) -> None:
        """Record "not run" for each test to be measured. Its real outcome replaces this when it ends."""
        self.measured = dict.fromkeys(tests, Outcome(kind=OutcomeKind.NOT_RUN))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store how a test ended: the first of setup, call and teardown that did not pass decides."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome not in ("passed", "failed", "skipped"):
            self.repeated[report.nodeid] = _reason_of(report)
            return  # another plugin's word, such as "rerun": the next report of the test decides
        known, decides = self.measured.get(report.nodeid), report.when == "call" or not report.passed
        kind = OutcomeKind(report.outcome)
        if report.failed and "base_failed" in report.keywords:
            kind = OutcomeKind.BASE_FAILED
        elif report.skipped and "candidate_cannot" in report.keywords:
            kind = OutcomeKind.CANDIDATE_CANNOT
        outcome = Outcome(kind=kind, reason=_reason_of(report))
        if known is None:
            if report.failed:
                self.other_failures[report.nodeid] = outcome
        elif known.kind in (OutcomeKind.NOT_RUN, OutcomeKind.PASSED, OutcomeKind.BASE_FAILED) and decides:
            self.measured[report.nodeid] = outcome


def measures(item: pytest.Item) -> bool:
    return "measure" in getattr(item, "fixturenames", ())


def spec_of(item: pytest.Item) -> Any:
    """Return the parameter `spec` of a test; None if it has none, and NOTSET if there is no case."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("spec") if callspec is not None else None


def _is_below(test: str, path: str) -> bool:
    """Return whether a test id belongs to the folder, file or function that a path names."""
    return path == "" or test == path or test.startswith((f"{path}/", f"{path}::", f"{path}["))


def _reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the first line that says why a test or a file failed or was skipped."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, message
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longreprtext).strip()
    return text.partition("\n")[0].removeprefix("Failed: ") or report.outcome
