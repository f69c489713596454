"""The outputs of a test run: its verdict, the stored run, files, and the printed tables.

ddpperf saves the run in place of pytest-benchmark. pytest-benchmark saves a slower run before it
compares, writes files where another Python version does not find them, and loses a test whose rank
died.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest.cacheprovider import LFPlugin
from _pytest.junitxml import LogXML, xml_key
from pytest_benchmark.plugin import pytest_benchmark_generate_commit_info, pytest_benchmark_generate_json

from ddpperf.errors import Refused, first_line
from ddpperf.io.files import require_replaceable, write_atomically
from ddpperf.io.secret_values import shown_command_line
from ddpperf.io.terminal_text import harmless, printable_document
from ddpperf.machine import hardware
from ddpperf.plugin.options.benchmark_options import runs_tests
from ddpperf.plugin.session import Session
from ddpperf.report.html_page import PAGE_BEGINS, write_page
from ddpperf.report.markdown_pages import VERDICT_BEGINS, markdown
from ddpperf.report.questions import report_tables
from ddpperf.report.summary import WIDTH, markup, summary_lines, verdict_lines
from ddpperf.results.outcomes import Status, Verdict
from ddpperf.results.stored_runs import SCHEMA, is_baseline, to_json
from ddpperf.verdict.exit_status import Answer

# Fields of Options that are stored elsewhere, or not at all.
NOT_STORED = ("given", "images", "sides")
NO_READER = (errno.EPIPE, errno.EIO)  # errors of an output whose reader has ended, or whose terminal has
VERDICT = "ddpperf::verdict"  # the JUnit case that stands for the whole run


class RequestedFiles:
    """The files that the command line requests besides the stored run, and that can be written.

    The constructor reads the options before ddpperf changes them, and deletes an earlier run's
    verdict in the file of --verdict. Raises Refused if a file cannot be written.
    copy: the file of --benchmark-json. baseline: the name of --benchmark-save.
    """

    def __init__(self, config: pytest.Config) -> None:
        copy = config.getoption("benchmark_json")
        if copy is not None and not isinstance(copy, Path):
            copy.close()  # pytest-benchmark has already opened it
            copy = copy.name
        self.baseline: str | None = config.getoption("benchmark_save")
        page = config.getoption("report")
        self.page = _file("--report", page)
        self.verdict = _file("--verdict", config.getoption("verdict"))
        self.copy = _file("--benchmark-json", None if copy is None else str(copy))
        if self.page is not None:
            require_replaceable("--report", page, PAGE_BEGINS, "pages")
        if self.verdict is not None:
            require_replaceable("--verdict", config.getoption("verdict"), VERDICT_BEGINS.encode(), "verdicts")
            self.verdict.unlink(missing_ok=True)


def _file(option: str, text: str | None) -> Path | None:
    """Return the absolute path of an option's output file. Raises Refused if it cannot be written."""
    if text is None:
        return None
    path = Path(text).resolve()
    if not text or (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        raise Refused(f"{option} takes a file in a writable folder, got {text!r}; name another file")
    return path


class RunOutputs:
    """Decides the verdict when pytest ends, saves the run, prints its tables, and has the exit status.

    verdict: None before the run has ended, and always None if no performance test was collected.
    saved: whether everything was written and printed that the command line requests.
    """

    def __init__(self, config: pytest.Config, session: Session, files: RequestedFiles) -> None:
        self.verdict: Verdict | None = None
        self.saved = True
        self._lines: list[str] = []
        self._config = config
        self._session = session
        self._files = files
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
        if not self._needs_verdict(exitstatus):
            return
        answer, self.verdict = self._session.answer()
        self._report_worse(answer.worse if answer is not None else {}, self.verdict)
        document = printable_document(self._document(answer, self.verdict))
        self._save(document)
        width = self._width()
        verdict = verdict_lines(document["ddpperf"], width=width)
        tables = report_tables(document).splitlines() if self._config.getoption("tables") else []
        self._lines = [*summary_lines(document, width=width), *tables, *self._lines, *verdict]

    def _needs_verdict(self, exitstatus: int) -> bool:
        """Return whether the run needs a verdict, and report as a problem if it ended early."""
        session = self._session
        failed = exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
        if (failed and not session.measured()) or not session.is_suite or not runs_tests(self._config):
            return False
        if failed:
            if (refusal := sys.exception()) is not None:  # pytest has no hook for a usage error
                self._ended_by = _described(refusal)
            session.problems.append(f"pytest or a plugin failed during the tests: {self._ended_by}")
        elif self._ended_by or (
            exitstatus == pytest.ExitCode.INTERRUPTED and not session.collection.uncollected
        ):
            session.problems.append(f"the run was interrupted by {self._ended_by}".removesuffix(" by "))
        return True

    def _report_worse(self, worse: Mapping[str, str], verdict: Verdict) -> None:
        """Add the verdict and the worse tests to pytest's JUnit results and to the failures of --lf."""
        xml = self._config.stash.get(xml_key, None)
        for listener in filter(None, (xml, self._config.pluginmanager.get_plugin("lfplugin"))):
            for test, what in worse.items() if verdict.status is Status.FAIL else ():
                _report(listener, test, "call", what)
        if xml is not None:
            reasons = "\n".join(verdict.reasons)
            failure = f"{verdict.status}: {reasons}" if verdict.status is not Status.PASS else ""
            # JUnit calls a failed setup an error.
            _report(xml, VERDICT, "setup" if verdict.status is Status.NO_VERDICT else "call", failure)

    def plugin_failed(self, error: Exception) -> None:
        """Report that another plugin failed while pytest ended; the run has been saved before."""
        if self.verdict is None:
            raise error
        if isinstance(error, OSError) and error.errno in NO_READER:
            _drop_output()
            return
        self.saved = False
        self._lines.append(f"another plugin failed while the run ended: {_described(error)}")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self) -> None:
        """Print the tables and the verdict after the summaries of pytest and of other plugins."""
        self.print_lines()

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
            self.saved &= error.errno in NO_READER
            _drop_output()

    def _width(self) -> int:
        """Return the width of the printed lines, which follows a terminal."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        is_terminal = reporter is not None and reporter.isatty
        return min(max(self._config.get_terminal_writer().fullwidth, 80), 200) if is_terminal else WIDTH

    def _save(self, document: dict[str, Any]) -> None:
        """Write the run as JSON and, on request, a copy, a baseline, the Markdown and the page."""
        storage, collection, files = self._session.inputs.storage, self._session.collection, self._files
        if collection.tests or collection.uncollected:
            commit = document["ddpperf"]["environment"]["commit"]
            self._write("the run", storage.runs, partial(storage.save_run, document, commit))
            if files.copy:
                self._write("the JSON", files.copy, partial(write_atomically, files.copy, to_json(document)))
            if files.baseline and is_baseline(document):
                promote = partial(storage.promote, document, files.baseline)
                self._write("the baseline", storage.baselines, promote)
            elif files.baseline:
                self._lines.append(f"not saved as a baseline: {_no_baseline(document['ddpperf'])}")
        text = markdown(document, summary_lines(document))
        if files.verdict:
            self._write("the verdict", files.verdict, partial(write_atomically, files.verdict, text))
        if files.page:
            try:
                page = partial(write_page, files.page, document, storage.kept())
                self._write("the page", files.page, page)
            except Exception as error:  # such as a broken installation of matplotlib
                self.saved = False
                again = "the run is saved, so python -m ddpperf.report can try again"
                self._lines.append(f"the page could not be made ({first_line(error)}); {again}")
        if step_summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            path = Path(step_summary)
            self._write("the step's summary", path, partial(_append, path, text))

    def _write(self, what: str, where: Path, write: Callable[[], Path]) -> None:
        try:
            self._lines.append(f"saved {what}: {os.path.relpath(write())}")
        except OSError as error:
            self.saved = False
            why = f"{where} cannot be written ({error.strerror})"
            self._lines.append(f"{what} was not saved: {why}; make it writable")

    def _document(self, answer: Answer | None, verdict: Verdict) -> dict[str, Any]:
        """Return the JSON document of the run, in pytest-benchmark's format with ddpperf's part."""
        measures = self._session.measures.values()
        document: dict[str, Any] = pytest_benchmark_generate_json(
            config=self._config,
            benchmarks=[stats for measure in measures if (stats := measure.stats())],
            include_data=True,
            machine_info=hardware.machine_info(),
            commit_info=pytest_benchmark_generate_commit_info(config=self._config),
        )
        command_line = shown_command_line(map(str, self._config.invocation_params.args))
        return document | {"ddpperf": header(self._session, command_line, answer, verdict)}


def header(session: Session, command_line: str, answer: Answer | None, verdict: Verdict) -> dict[str, Any]:
    """Return the part of a stored run's JSON document that ddpperf adds to pytest-benchmark's."""
    options, comparison, seconds = session.options, session.run.comparison, session.outcomes.seconds
    images = options.images
    return {
        "schema": SCHEMA,
        "hardware_key": session.inputs.storage.hardware_key,
        "environment": session.environment(),
        "machine_findings": [asdict(finding) for finding in session.machine_findings],
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
        "thresholds": session.inputs.thresholds.to_json(),
        "recipes": session.collection.recipes,
        "left_out": dict(Counter(test.partition("::")[0] for test in session.collection.left_out)),
        "timing": {
            "seconds": time.monotonic() - session.outcomes.begun,
            "counted_seconds": sum(measuring.pool.counted_seconds for measuring in session.passes),
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


def _report(listener: LogXML | LFPlugin, test: str, when: Literal["setup", "call"], failure: str) -> None:
    """Report a test to one of pytest's plugins, even if the test was already reported as passed."""
    path, _, name = test.partition("::")
    for phase, why in ((when, failure), ("teardown", "")):
        outcome: Literal["failed", "passed"] = "failed" if why else "passed"
        location = (path, None, name)
        report = pytest.TestReport(test, location, {}, outcome, why or None, phase)  # type: ignore[arg-type]
        listener.pytest_runtest_logreport(report)
