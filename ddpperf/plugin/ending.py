"""The end of a run: it is saved, decided, and told. Saving is taken over from pytest-benchmark, which saves a regressed run
before it looks, puts files where another Python does not find them, and loses a test whose rank died."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pytest

from ddpperf.plugin.junit import tell_junit
from ddpperf.plugin.options.outputs import file_to_write
from ddpperf.plugin.session import Session
from ddpperf.report.summary import markdown, summary_lines
from ddpperf.results.outcomes import Status, Verdict
from ddpperf.results.stored_runs import SCHEMA, is_baseline, write_atomically
from ddpperf.verdict.verdict import Answer

EXIT_STATUS = {Status.PASS: 0, Status.FAIL: 1, Status.NO_VERDICT: 125}  # `git bisect run` skips a 125


class Ending:
    """Saves the run in pytest-benchmark's format, sets the exit status, and prints the table last.

    Made while the options are still as they were typed; `decide` comes before any other plugin writes what it has seen.
    lines: what to print; none if this was no run of the suite.
    """

    def __init__(self, config: pytest.Config, session: Session, verdict_to: Path | None) -> None:
        self.lines: list[str] = []
        self.decided: tuple[Answer | None, Verdict] | None = None
        self._config = config
        self._session = session
        self._promote_as: str | None = config.getoption("benchmark_save")
        copy_to = _path(config.getoption("benchmark_json"))
        self._copy_to = copy_to and file_to_write("--benchmark-json", str(copy_to))
        self._verdict_to = verdict_to
        self._interrupted_by = ""  # the signal's name
        self._disabled = bool(config.getoption("benchmark_disable") or config.getoption("benchmark_skip"))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if (
            excinfo.type is KeyboardInterrupt
        ):  # pytest asks at its own exits, too, whose texts are other sentences
            self._interrupted_by = str(excinfo.value)

    def decide(self, exitstatus: int) -> None:
        """Decide, if this was a run of the suite, and tell JUnit's file."""
        ran = exitstatus not in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
        if not (ran and self._session.active) or self._config.option.collectonly:
            return
        if exitstatus == pytest.ExitCode.INTERRUPTED and not self._session.reports.uncollected:
            by = f" by {self._interrupted_by}" if self._interrupted_by else ""
            self._session.problems.append(f"the run was interrupted{by}")
        if self._disabled:
            self._session.problems.append("benchmarks were disabled on the command line")
        self.decided = answer, verdict = self._session.decide()
        worse = answer.failures() if answer is not None and verdict.status is Status.FAIL else {}
        tell_junit(self._config, worse, verdict)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.decided is None:
            return
        document = self._document(*self.decided)
        verdict = self.decided[1]
        self.lines = summary_lines(document, self._session.comparison)
        page = markdown(document, self.lines)
        saved = (
            self._save(document)
            if self._session.reports.outcomes or self._session.reports.uncollected
            else True
        )
        saved = self._publish(page) and saved
        session.exitstatus = EXIT_STATUS[verdict.status]
        if not saved and verdict.status is not Status.FAIL:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def _save(self, document: dict[str, Any]) -> bool:
        """Write what is to be written; what cannot be is said, and costs nothing else."""
        commit = self._session.environment["commit"]
        storage = self._session.storage
        written = [self._try("the run", storage.runs, lambda: storage.save_run(document, commit))]
        if copy_to := self._copy_to:
            written.append(self._try("the JSON", copy_to, lambda: write_atomically(copy_to, document)))
        if name := self._promote_as:
            if is_baseline(document):
                written.append(
                    self._try("the baseline", storage.baselines, lambda: storage.promote(document, name))
                )
            else:
                self.lines.append(f"not saved as a baseline: {_no_baseline(document['ddpperf'])}")
        return all(written)

    def _publish(self, page: str) -> bool:
        """Write the verdict, as Markdown, to where it is read."""
        written = []
        if verdict_to := self._verdict_to:
            written.append(self._try("the verdict", verdict_to, lambda: write_atomically(verdict_to, page)))
        if step_summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            written.append(
                self._try("the step's summary", Path(step_summary), lambda: _append(Path(step_summary), page))
            )
        return all(written)

    def _try(self, what: str, where: Path, write: Callable[[], Path]) -> bool:
        try:
            path = write()
        except OSError as error:
            self.lines.append(
                f"{what} was not saved: {where} cannot be written ({error.strerror}); make it writable"
            )
            return False
        self.lines.append(f"saved {what}: {os.path.relpath(path)}")
        return True

    def _document(self, answer: Answer | None, verdict: Verdict) -> dict[str, Any]:
        """The run as pytest-benchmark's own hooks make it, with a part of ours beside."""
        hook = self._config.hook
        benchmarks = [
            measure.stats for measure in self._session.measures.values() if measure.stats is not None
        ]
        document: dict[str, Any] = hook.pytest_benchmark_generate_json(
            config=self._config,
            benchmarks=benchmarks,
            include_data=True,
            machine_info=hook.pytest_benchmark_generate_machine_info(config=self._config),
            commit_info=hook.pytest_benchmark_generate_commit_info(config=self._config),
        )
        return document | {"ddpperf": header(self._session, answer, verdict)}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """Print the lines last, whatever becomes of the other summaries."""
        try:
            return (yield)
        finally:
            if self.lines:
                terminalreporter.section("ddpperf", bold=True)
                for line in self.lines:
                    terminalreporter.line(line)


def header(session: Session, answer: Answer | None, verdict: Verdict) -> dict[str, Any]:
    """The run's own part of the JSON, beside pytest-benchmark's."""
    return {
        "schema": SCHEMA,
        "hardware_key": session.storage.hardware_key,
        "environment": session.environment,
        "options": {
            "command_line": session.command_line,
            **{name: value for name, value in asdict(session.options).items() if name != "sides"},
            "data": {"name": session.options.data.name, "digest": session.options.data.digest},
        },
        **(
            {session.gate.name: session.gate.to_json()}
            if session.gate is not None and session.gate.active
            else {}
        ),
        "copied": session.controls.copied and session.controls.copied.to_json(),
        "thresholds": session.thresholds.counts(),
        "gate": session.in_gate,
        "timing": {
            "seconds": time.monotonic() - session.begun,
            "counted_seconds": session.counted_seconds,
            "test_seconds": session.reports.seconds,
            "overhead_seconds": {
                test: session.reports.seconds[test] - measure.counted_seconds
                for test, measure in session.measures.items()
                if test in session.reports.seconds
            },
        },
        "outcomes": {test: asdict(outcome) for test, outcome in session.outcomes().items()},
        "verdict": asdict(verdict),
        "compared_with": session.comparison and session.comparison.baseline,
        "unfit": answer.unfit() if answer is not None else [],
    }


def _no_baseline(header: dict[str, Any]) -> str:
    if "against" in header:
        return "two sides were measured in turn, and a baseline is of one"
    if header["unfit"]:
        return str(header["unfit"][0])
    return "not every test of this run was measured, undelayed, and passed"


def _append(path: Path, text: str) -> Path:
    with path.open("a") as file:
        file.write(text)
    return path


def _path(option: Path | IO[bytes] | None) -> Path | None:
    """The path of --benchmark-json, which pytest-benchmark 5.2 has already opened as a file."""
    if option is None or isinstance(option, Path):
        return option
    option.close()
    return Path(option.name)
