"""The outputs of a test run: its verdict, the stored run, files, and the printed tables.

ddpperf saves the run in place of pytest-benchmark. pytest-benchmark saves a slower run before it
compares, writes files where another Python version does not find them, and loses a test whose rank
died.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from math import log
from pathlib import Path
from statistics import median
from typing import Any, Literal

import pytest
from _pytest.cacheprovider import LFPlugin
from _pytest.junitxml import LogXML, xml_key
from pytest_benchmark.plugin import pytest_benchmark_generate_commit_info, pytest_benchmark_generate_json

from ddpperf.errors import Refused, first_line
from ddpperf.history.past_runs import MOST_OF_DRIFT, past_runs
from ddpperf.history.run_drift import drifts
from ddpperf.io.files import require_replaceable, write_atomically
from ddpperf.io.secret_values import shown_command_line
from ddpperf.io.terminal_text import harmless, printable, printable_document
from ddpperf.machine import hardware
from ddpperf.machine.git import NO_COMMIT, without_commit
from ddpperf.plugin.judge import Judge
from ddpperf.plugin.options.benchmark_options import runs_tests
from ddpperf.plugin.options.options import is_experiment
from ddpperf.plugin.session import Session
from ddpperf.report.html_page import PAGE_BEGINS, page
from ddpperf.report.markdown_pages import VERDICT_BEGINS, github_annotations, markdown
from ddpperf.report.questions import report_tables
from ddpperf.report.summary import WIDTH, markup, summary_lines, verdict_lines
from ddpperf.results.outcomes import AGAIN, Reason, Status, Verdict
from ddpperf.results.stored_runs import SCHEMA, Baseline, is_ab_run, is_baseline, to_json
from ddpperf.verdict.noise_classes import usual_spread
from ddpperf.verdict.verdict import decide

# Fields of Options that are stored elsewhere, or not at all.
NOT_STORED = ("given", "data", "sides")
VERDICT = "ddpperf::verdict"  # the JUnit case that stands for the whole run


class RunOutputs:
    """Decides the verdict when pytest ends, saves the run, and prints its tables."""

    def __init__(self, config: pytest.Config) -> None:
        """Read which files the command line requests, and delete an earlier run's verdict.

        Raises Refused if a file cannot be written.
        """
        self.verdict: Verdict | None = None  # None before the run ended, or if it measured nothing
        self.saved = True  # whether everything was written and printed that the command line requests
        self._lines: list[str] = []
        self._annotations: list[str] = []  # of GitHub
        self._signal = ""  # that interrupted the run
        self._config = config
        self._verdict_file = _file("--verdict", config.option.verdict, VERDICT_BEGINS.encode(), "verdicts")
        if self._verdict_file is not None:
            self._verdict_file.unlink(missing_ok=True)
        if (copy := config.option.benchmark_json) is not None and not isinstance(copy, Path):
            copy.close()  # pytest-benchmark has already opened it
            copy = copy.name
        self._copy = _file("--benchmark-json", copy and str(copy))
        self._baseline: str | None = config.option.benchmark_save
        self._page = _file("--report", config.option.report, PAGE_BEGINS, "pages")
        compared = config.getoption("benchmark_compare")
        stored = Path(compared).resolve() if isinstance(compared, str) else None
        files = [self._verdict_file, self._copy, self._page, stored]
        for file in filter(None, files):
            if files.count(file) > 1:
                raise Refused(f"two options name {file.name}, but each takes its own file; name another")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if excinfo.type is KeyboardInterrupt:  # pytest calls this hook for its own exits, too
            self._signal = str(excinfo.value)

    def end(self, session: Session, judge: Judge, exitstatus: int) -> None:
        """End all worker processes, decide the verdict and save the run.

        Later failures of other plugins cannot lose what was measured.
        """
        try:
            session.finish()
        except Exception as error:
            what = f"the worker processes could not be ended: {first_line(error)}"
            session.problems.append(Reason(what, f"end them, then {AGAIN}"))
        if not self._needs_verdict(session, exitstatus):
            return
        if session.compares and session.code_changed:
            what = "tracked files changed while they were measured, so two versions may have been mixed"
            session.problems.append(Reason(what, f"{AGAIN}, and edit no file meanwhile"))
        ended, uncollected = session.outcomes, session.collection.uncollected
        outcomes = ended.measured | uncollected | ended.other_failures
        try:
            answer = judge.answer(outcomes)
        except Exception as error:  # what was measured is stored all the same
            answer = None
            session.problems.append(
                Reason(f"the run could not be judged: {_fault(error)}", "report this fault")
            )
        measured, problems = session.measured(), session.problems
        self.verdict = verdict = decide(outcomes, measured=measured, answer=answer, problems=problems)
        self._report_worse(answer.worse if answer is not None else {}, verdict)
        header = _header(session, shown_command_line(map(str, self._config.invocation_params.args)))
        header |= {
            "outcomes": {test: asdict(outcome) for test, outcome in outcomes.items()},
            "verdict": asdict(verdict),
            "unfit": answer.unfit if answer is not None else [],
            **judge.to_json(),
        }
        if session.baseline is not None:
            header["judged"]["drifts"] = _drifts(session, session.baseline)
        document = printable_document(self._document(session) | {"ddpperf": header})
        self._save(session, document)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            self._annotations = github_annotations(document)
        width = self._width()
        tables = report_tables(document).splitlines() if self._config.getoption("tables") else []
        form: dict[str, Any] = {"width": width, "verbose": self._config.getoption("verbose", 0) > 0}
        last = verdict_lines(document["ddpperf"], **form)
        self._lines = [*summary_lines(document, **form), *tables, *self._lines, *last]

    def _needs_verdict(self, session: Session, exitstatus: int) -> bool:
        """Return whether the run needs a verdict, and report as a problem if it ended early.

        It needs none if the command line left all performance tests out, and other tests ran.
        """
        found = session.outcomes.measured or (session.collection.deselected and not session.outcomes.seconds)
        interrupted = self._signal and session.host  # while images, interpreters or models were checked
        requested = session.options.sides is not None or session.compares or interrupted
        failed = exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
        if (
            (failed and not session.measured())
            or not (requested or found or any(map(is_experiment, session.collection.uncollected)))
            or not runs_tests(self._config)
        ):
            return False
        if failed:
            session.problems.append(
                Reason("pytest or a plugin failed during the tests", "read its error above")
            )
        elif self._signal:
            session.problems.append(Reason(f"the run was interrupted by {self._signal}", AGAIN))
        elif exitstatus == pytest.ExitCode.INTERRUPTED and not session.collection.uncollected:
            session.problems.append(Reason("the run was interrupted", AGAIN))
        if (count := len(session.collection.deselected)) and not session.outcomes.measured:
            how = "were deselected on the command line"
            if session.collection.left_out:
                how = "were left out or deselected; --full runs the tests outside the core suite"
            session.problems.append(Reason(f"all {count} tests {how}", "select at least one test"))
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
        self.saved = False
        self._lines.append(f"another plugin failed while the run ended: {_fault(error)}")

    def failed(self, error: Exception) -> None:
        """Report that ddpperf itself failed, which is no FAIL of the measured code, and hides none."""
        reasons: tuple[str, ...] = (f"the results could not be shown: {_fault(error)}",)
        status = Status.NO_VERDICT
        if self.verdict is not None and self.verdict.status is Status.FAIL:
            status, reasons = Status.FAIL, (*self.verdict.reasons, *reasons)
        self.verdict = Verdict(status=status, reasons=reasons)
        self._lines.append(f"{status}: {'; '.join(reasons)}")

    def print_lines(self) -> None:
        """Print the tables and the verdict, after the summaries of pytest and of other plugins."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        try:
            if reporter is not None and self._lines:
                reporter.section("ddpperf", bold=True)
                for line in self._lines:
                    reporter.line(harmless(line), **markup(line))
                for line in self._annotations:
                    reporter.line(printable(line))
            sys.stdout.flush()
        except OSError:  # a full disk, or a reader that has ended; Python would fail again at its end
            self.saved = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _width(self) -> int:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        is_terminal = reporter is not None and reporter.isatty
        return min(max(self._config.get_terminal_writer().fullwidth, 80), 200) if is_terminal else WIDTH

    def _save(self, session: Session, document: dict[str, Any]) -> None:
        """Write the run as JSON and, on request, a copy, a baseline, a Markdown page and an HTML page."""
        storage, collection = session.storage, session.collection
        if collection.tests or collection.uncollected:
            commit = document["ddpperf"]["environment"]["commit"]
            self._write("the run", partial(storage.save_run, document, commit))
            if self._copy:
                self._write("the JSON", partial(write_atomically, self._copy, to_json(document)))
            if self._baseline and is_baseline(document):
                self._write("the baseline", partial(storage.promote, document, self._baseline))
                self._lines += _lost_code(commit, storage.root)
            elif self._baseline:
                self._lines.append(f"not saved as a baseline: {_no_baseline(document['ddpperf'])}")
        if path := self._verdict_file:
            self._write("the verdict", partial(write_atomically, path, markdown(document)))
        if path := self._page:
            self._write("the page", lambda: write_atomically(path, page(document, storage.root)))

    def _write(self, what: str, write: Callable[[], Path]) -> None:
        try:
            self._lines.append(f"saved {what}: {os.path.relpath(write())}")
        except Exception as error:  # such as a full disk, or a broken installation of matplotlib
            self.saved = False
            self._lines.append(f"{what} was not saved: {first_line(error)}")

    def _document(self, session: Session) -> dict[str, Any]:
        document: dict[str, Any] = pytest_benchmark_generate_json(
            config=self._config,
            benchmarks=[session.measures[test].stats() for test in session.measured()],
            include_data=True,
            machine_info=hardware.machine_info(),
            commit_info=pytest_benchmark_generate_commit_info(config=self._config),
        )
        return document


def _fault(error: Exception) -> str:
    """Return an error that nobody expected, with the place where it occurred."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {first_line(error)}, in line {last.lineno} of {last.filename}"


def _header(session: Session, command_line: str) -> dict[str, Any]:
    """Return what ddpperf stores of a whole run besides the judge's answer, as JSON."""
    options = session.options
    return {
        "schema": SCHEMA,
        "hardware_key": session.storage.hardware_key,
        "environment": session.environment(),
        "machine_findings": [asdict(finding) for finding in session.machine_findings],
        "options": {
            "command_line": command_line,
            **{name: value for name, value in asdict(options).items() if name not in NOT_STORED},
            "input": options.input,
            "data": {"name": options.data.name, "digest": options.data.digest},
            "epoch_images": options.epoch_images,
        },
        "thresholds": session.thresholds.to_json(),
        "recipes": session.collection.recipes,
        "left_out": dict(Counter(test.partition("::")[0] for test in session.collection.left_out)),
        "timing": {
            "seconds": time.monotonic() - session.outcomes.begun,
            "counted_seconds": sum(measuring.pool.counted_seconds for measuring in session.passes),
        },
    }


def _drifts(session: Session, baseline: Baseline) -> dict[str, float]:
    """Return the slow drifts of step times over the stored runs, as `run_drift.drifts` does."""
    logs = {(test, run.spec): log(median(run.all_step_seconds())) for test, run in session.measured().items()}
    history, _ = past_runs(session.storage, MOST_OF_DRIFT, [baseline.path])
    usual = {work: usual_spread("time", work[1], session.settings) for work in logs}
    return drifts(history, logs, usual, session.settings.false_alarms)


def _lost_code(commit: str, root: Path) -> list[str]:
    """Return a line if the code of a new baseline can never be measured beside other code."""
    if commit == NO_COMMIT:
        why = f"it has no commit ({without_commit(root)})"
    elif commit.endswith("+"):
        why = "its code had changes that were not committed; commit them, then save a new baseline"
    else:
        return []
    return [f"no code can be compared with this baseline: {why}"]


def _no_baseline(header: dict[str, Any]) -> str:
    if is_ab_run(header):
        return "an A/B run measures two versions of the code, and a baseline holds only one"
    if header["unfit"]:
        return str(header["unfit"][0])
    return "a test of this run failed, was not measured, or was delayed by delay_seconds"


def _report(listener: LogXML | LFPlugin, test: str, when: Literal["setup", "call"], failure: str) -> None:
    """Report a test to one of pytest's plugins, even if the test was already reported as passed."""
    path, _, name = test.partition("::")
    for phase, why in ((when, failure), ("teardown", "")):
        outcome: Literal["failed", "passed"] = "failed" if why else "passed"
        location = (path, None, name)
        report = pytest.TestReport(test, location, {}, outcome, why or None, phase)  # type: ignore[arg-type]
        listener.pytest_runtest_logreport(report)


def _file(option: str, text: str | None, begins: bytes = b"", kind: str = "") -> Path | None:
    """Return the absolute path of an option's output file.

    Raises Refused if the file cannot be written, or is of another kind than earlier outputs.
    """
    if text is None:
        return None
    path = Path(text).resolve()
    if not text or (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        raise Refused(f"{option} takes a file in a writable folder, got {text!r}; name another file")
    if kind:
        require_replaceable(option, text, begins, kind)
    return path
