"""The end of a test run, which decides, saves and prints the verdict.

ddpperf saves the run in place of pytest-benchmark. pytest-benchmark saves a slower run before it
compares, writes files where another Python version does not find them, and loses a test whose rank
died.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest.cacheprovider import LFPlugin
from _pytest.junitxml import LogXML, xml_key
from pytest_benchmark.plugin import pytest_benchmark_generate_json

from ddpperf.errors import first_line
from ddpperf.foreign_text import harmless, printable_document
from ddpperf.machine import hardware
from ddpperf.plugin.core_suite import by_file
from ddpperf.plugin.options.benchmark_options import runs_tests
from ddpperf.plugin.options.outputs import Outputs, file_to_write
from ddpperf.plugin.session import Session
from ddpperf.report.layout import wrapped
from ddpperf.report.markdown import markdown
from ddpperf.report.page import write_page
from ddpperf.report.questions import report_tables
from ddpperf.report.summary import fitting_width, markup, summary_lines, verdict_lines
from ddpperf.results.outcomes import Status, Verdict
from ddpperf.results.stored_runs import SCHEMA, is_baseline, storable, write_atomically
from ddpperf.secret_values import shown_command_line
from ddpperf.verdict.exit_status import Answer, exit_status

# Fields of Options that are stored elsewhere, or not at all.
NOT_STORED = ("given", "images", "sides")
NO_READER = (errno.EPIPE, errno.EIO)  # errors of an output whose reader has ended, or whose terminal has
VERDICT = "ddpperf::verdict"  # the JUnit case that stands for the whole run


class Ending:
    """Saves a run in pytest-benchmark's format, prints its table and sets the exit status.

    The constructor reads the options as they were typed, before ddpperf changes them.
    answer: the result of a comparison; None before the verdict, or if nothing was compared.
    verdict: None before the run has ended, and always None if no performance test was collected.
    outputs: the requested files, such as that of --verdict.
    """

    def __init__(self, config: pytest.Config, session: Session, outputs: Outputs) -> None:
        self.answer: Answer | None = None
        self.verdict: Verdict | None = None
        self._lines: list[str] = []
        self._saved = True
        self._config = config
        self._session = session
        self._promote_as: str | None = config.getoption("benchmark_save")
        copy_to = config.getoption("benchmark_json")
        if copy_to is not None and not isinstance(copy_to, Path):
            copy_to.close()  # pytest-benchmark has already opened it
            copy_to = copy_to.name
        self._copy_to = copy_to and file_to_write("--benchmark-json", str(copy_to))
        self._outputs = outputs
        self._ended_by = ""  # the signal that interrupted the run, or the error that ended it

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if excinfo.type is KeyboardInterrupt:  # pytest calls this hook for its own exits, too
            self._ended_by = str(excinfo.value)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._ended_by = _described(excinfo.value)

    def end(self, exitstatus: int) -> None:
        """End all worker processes, decide the verdict and save the run.

        Later failures of other plugins cannot lose what was measured.
        """
        try:
            self._session.finish()
        except Exception as error:
            self._session.problems.append(f"the worker processes could not be ended: {_described(error)}")
        self._decide(exitstatus)
        if self.verdict is None:
            return
        document = printable_document(self._document(self.verdict))
        self._save(document)
        width = self._width()
        verdict = verdict_lines(document["ddpperf"], width=width)
        tables = report_tables(document).splitlines() if self._outputs.tables else []
        self._lines = [*summary_lines(document, width=width), *tables, *self._lines, *verdict]

    def _decide(self, exitstatus: int) -> None:
        """Decide the verdict, and add it to pytest's JUnit results and to the failures of --lf."""
        session = self._session
        failed = exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
        if (failed and not session.has_measured) or not session.is_suite or not runs_tests(self._config):
            return
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        if failed:
            if (refusal := sys.exception()) is not None:  # pytest has no hook for a usage error
                self._ended_by = _described(refusal)
            session.problems.append(f"pytest or a plugin failed during the tests: {self._ended_by}")
        elif self._ended_by or (interrupted and not session.collection.uncollected):
            by = f" by {self._ended_by}" if self._ended_by else ""
            session.problems.append(f"the run was interrupted{by}")
        self.answer, self.verdict = session.answer()
        worse = self.answer.worse if self.answer and self.verdict.status is Status.FAIL else {}
        xml = self._config.stash.get(xml_key, None)
        for listener in filter(None, (xml, self._config.pluginmanager.get_plugin("lfplugin"))):
            for test, what in worse.items():
                _report(listener, test, "call", what)
        if xml is not None:
            _report_verdict(xml, self.verdict)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """Keep the failure of another plugin, so that pytest prints its summaries nevertheless."""
        with self._keeping_failures():
            yield

    @contextlib.contextmanager
    def _keeping_failures(self) -> Iterator[None]:
        try:
            yield
        except pytest.exit.Exception:  # pytest prints its reason
            raise
        except BaseException as error:
            if self.verdict is None:
                raise
            self._add_failure(error)

    def _add_failure(self, error: BaseException) -> None:
        self._saved = False
        what = f"another plugin failed while the run ended: {_described(error)}"
        advice = "the verdict is valid; correct the plugin, or do not pass its option"
        self._lines += wrapped(f"{what}; {advice}", self._width())

    def ended(self, failure: BaseException | None) -> bool:
        """Print what was not printed yet, and return whether the run has a verdict.

        failure: what another plugin, or pytest, raised after the tests.
        """
        tests = self._config.pluginmanager.get_plugin("session")
        if failure is not None and self.verdict is None and isinstance(tests, pytest.Session):
            self.end(int(tests.exitstatus))  # another plugin kept pytest from calling us
        if self.verdict is None:
            return False
        if isinstance(failure, OSError) and failure.errno in NO_READER:
            _drop_output()
        elif failure is not None and _described(failure) != self._ended_by:
            self._add_failure(failure)
        self.print_lines()
        return True

    def print_lines(self) -> None:
        """Print the lines of this run that were not printed yet."""
        lines, self._lines = self._lines, []
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        try:
            if reporter is not None and lines:
                reporter.section("ddpperf", bold=True)
                for line in lines:
                    reporter.line(harmless(line), **markup(line))
            sys.stdout.flush()
        except OSError as error:
            self._saved &= error.errno in NO_READER
            _drop_output()

    def exit_status(self) -> int:
        """Return the exit status of the verdict.

        A PASS is 0, so that the exit status of another plugin holds, such as that of --fail-on-flaky.
        """
        assert self.verdict is not None
        return exit_status(self.verdict.status, saved=self._saved)

    def _width(self) -> int:
        """Return the width of the printed lines, which follows a terminal."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        is_terminal = reporter is not None and reporter.isatty
        return fitting_width(self._config.get_terminal_writer().fullwidth if is_terminal else None)

    def _save(self, document: dict[str, Any]) -> None:
        """Write the run as JSON and, on request, a copy, a baseline and the Markdown page."""
        storage, collection, name = self._session.setup.storage, self._session.collection, self._promote_as
        if collection.tests or collection.uncollected:
            save_run = partial(storage.save_run, document, self._session.host["commit"])
            self._write("the run", storage.runs, save_run)
            if copy_to := self._copy_to:
                self._write("the JSON", copy_to, partial(write_atomically, copy_to, document))
            if name and is_baseline(document):
                self._write("the baseline", storage.baselines, partial(storage.promote, document, name))
            elif name:
                self._lines.append(f"not saved as a baseline: {_no_baseline(document['ddpperf'])}")
        outputs, text = self._outputs, markdown(document, summary_lines(document))
        if path := outputs.verdict:
            self._write("the verdict", path, partial(write_atomically, path, text))
        if path := outputs.page:
            self._draw("the page", path, partial(write_page, path, document, storage.kept()))
        if step_summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            path = Path(step_summary)
            self._write("the step's summary", path, partial(_append, path, text))

    def _write(self, what: str, where: Path, write: Callable[[], Path]) -> None:
        try:
            self._lines.append(f"saved {what}: {os.path.relpath(write())}")
        except OSError as error:
            self._saved = False
            why = f"{where} cannot be written ({error.strerror})"
            self._lines.append(f"{what} was not saved: {why}; make it writable")

    def _draw(self, what: str, where: Path, write: Callable[[], Path]) -> None:
        """Write a page or pictures; whatever a library raises must not hide the verdict."""
        try:
            self._write(what, where, write)
        except Exception as error:  # such as a broken installation of matplotlib
            self._saved = False
            again = "the run is saved, so python -m ddpperf.report can try again"
            self._lines.append(f"{what} could not be made ({first_line(error)}); {again}")

    def _document(self, verdict: Verdict) -> dict[str, Any]:
        """Return the JSON document of the run, in pytest-benchmark's format with ddpperf's part."""
        hook = self._config.hook
        commit_info: dict[str, Any] = {}
        with self._keeping_failures():  # pytest-benchmark lets other plugins describe the commit and the run
            commit_info = hook.pytest_benchmark_generate_commit_info(config=self._config)
        measures = self._session.measures.values()
        given: dict[str, Any] = {
            "config": self._config,
            "benchmarks": [stats for measure in measures if (stats := measure.stats())],
            "include_data": True,
            "machine_info": hardware.machine_info(),
            "commit_info": commit_info,
        }
        document: dict[str, Any] = {}
        with self._keeping_failures():
            document = hook.pytest_benchmark_generate_json(**given)
        document = document or pytest_benchmark_generate_json(**given)
        for benchmark in document["benchmarks"]:
            benchmark["extra_info"] = storable(benchmark["extra_info"])
        command_line = shown_command_line(map(str, self._config.invocation_params.args))
        return document | {"ddpperf": header(self._session, command_line, self.answer, verdict)}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self) -> Iterator[None]:
        """Print ddpperf's table after all other summaries, even if another summary fails."""
        with self._keeping_failures():
            yield
        self.print_lines()


def header(session: Session, command_line: str, answer: Answer | None, verdict: Verdict) -> dict[str, Any]:
    """Return the part of a stored run's JSON document that ddpperf adds to pytest-benchmark's."""
    options, comparison, seconds = session.options, session.run.comparison, session.outcomes.seconds
    images = options.images
    return {
        "schema": SCHEMA,
        "hardware_key": session.setup.storage.hardware_key,
        "environment": session.environment(),
        "machine_findings": [asdict(finding) for finding in session.resources.machine_findings],
        "options": {
            "command_line": command_line,
            **{name: value for name, value in asdict(options).items() if name not in NOT_STORED},
            "input": options.input,
            "data": {
                "name": images.name if images is not None else options.data_source.partition(":")[0],
                "digest": images.digest if images is not None else "",
            },
            "epoch_images": options.epoch_images if images is not None else None,
        },
        **session.run.to_json(),
        "thresholds": session.setup.thresholds.to_json(),
        "gate": session.collection.gate,
        "recipes": session.collection.recipes,
        "left_out": by_file(session.collection.left_out),
        "timing": {
            "seconds": time.monotonic() - session.outcomes.begun,
            "counted_seconds": sum(measuring.pool.counted_seconds for measuring in session.passes),
            "test_seconds": seconds,
            "overhead_seconds": {
                test: seconds[test] - measure.counted_seconds
                for test, measure in session.measures.items()
                if test in seconds
            },
        },
        "outcomes": {test: asdict(outcome) for test, outcome in session.outcomes_by_side().items()},
        "verdict": asdict(verdict),
        "compared_with": comparison and comparison.baseline,
        "comparison": comparison and comparison.to_json(),
        "unfit": list(answer.unfit) if answer is not None else [],
    }


def _no_baseline(header: dict[str, Any]) -> str:
    if "against" in header:
        return "an A/B run measures base and candidate, and a baseline has one of them"
    if header["unfit"]:
        return str(header["unfit"][0])
    return "a test of this run failed, was not measured, or was delayed by delay_seconds"


def _described(error: BaseException) -> str:
    """Return an exception's type, first line and place in the code, in at most 160 characters."""
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    place = f" (in {Path(last.filename).name}, line {last.lineno})" if last is not None else ""
    return f"{type(error).__name__}: {first_line(error)}"[: 160 - len(place)] + place


def _drop_output() -> None:
    """Discard what this process prints from now on, so that pytest does not fail with each line."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _append(path: Path, text: str) -> Path:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return path


def _report_verdict(xml: LogXML, verdict: Verdict) -> None:
    reasons = "\n".join(verdict.reasons)
    failure = f"{verdict.status}: {reasons}" if verdict.status is not Status.PASS else ""
    # JUnit calls a failed setup an error.
    _report(xml, VERDICT, "setup" if verdict.status is Status.NO_VERDICT else "call", failure)


def _report(listener: LogXML | LFPlugin, test: str, when: Literal["setup", "call"], failure: str) -> None:
    """Report a test to one of pytest's plugins, even if the test was already reported as passed."""
    path, _, name = test.partition("::")
    for phase, why in ((when, failure), ("teardown", "")):
        outcome: Literal["failed", "passed"] = "failed" if why else "passed"
        location = (path, None, name)
        report = pytest.TestReport(test, location, {}, outcome, why or None, phase)  # type: ignore[arg-type]
        listener.pytest_runtest_logreport(report)
