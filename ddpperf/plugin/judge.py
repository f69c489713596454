"""The judge of a run: it compares what was measured, and measures open pairs again on new processes.

A run is a list of stages. `--benchmark-compare` has the stored run, a first A/B measurement of what
the stored run leaves open, and repeats. An A/B run has a first measurement of all tests, and repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from ddpperf.errors import Refused, first_line
from ddpperf.machine.hardware import differences
from ddpperf.plugin.base_checkout import stored_sides
from ddpperf.plugin.control_steps import NO_STEP, copied, measure_controls, stored_copy
from ddpperf.plugin.measure_fixture import Measuring
from ddpperf.plugin.options.ab_sides import VERSIONS, Sides
from ddpperf.plugin.session import Session
from ddpperf.results.outcomes import Outcome, OutcomeKind, Reason
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.results.stored_runs import Baseline
from ddpperf.results.units import counted
from ddpperf.specs.script import ScriptSpec
from ddpperf.verdict.controls import untrusted
from ddpperf.verdict.estimates import (
    Estimates,
    RowKey,
    Stage,
    ab_estimates,
    stored_estimates,
    stored_missing,
    tests_by_pair,
)
from ddpperf.verdict.rows import REPEATS, Finding, Row, next_plan, only_the_machine_changed, rows
from ddpperf.verdict.verdict import Answer, Context, answer_of, needs_no_repeat
from ddpperf.why.differences import differences_of
from ddpperf.why.explain import Slower, explain

COMPARISON_ROUNDS = 6  # of the first A/B measurement of a comparison, where the time is short
LEAST_TIME = 0.25  # of --max-seconds, for the first A/B measurement, and for the first repeat


class Judge:
    """Compares the measurements of a run, and measures what they leave open."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sides: Sides | None = session.sides  # None if nothing was measured A/B
        self._settings = session.settings
        self._copied: Measured | None = None  # the copy of memory of a run without sides
        self._estimates: list[Estimates] = []
        self._tested: frozenset[RowKey] = frozenset()  # by the repeats
        self._problems: list[Reason] = []  # what could not be done
        self._late: list[Reason] = []  # what had no time left
        self._why: list[dict[str, Any]] = []  # as stored
        self._differ: list[str] = []  # between base and candidate
        self._stages: list[dict[str, Any]] = []  # of the measurements after the run's own, as stored

    def judge(self, items: Sequence[pytest.Item]) -> None:
        """Compare the run's measurements, measure open pairs again, and find out why some got slower."""
        self._compare(items)
        self._explain()

    def _compare(self, items: Sequence[pytest.Item]) -> None:
        """Compare the run's measurements, and measure open pairs again at most twice."""
        session = self._session
        if self._sides is not None:
            self._add(session.passes[0], Stage.FIRST)
        else:
            self._copied = copied(session.passes[0].pool, session.options.device)
            if session.baseline is None:
                return
            self._compare_stored(session.baseline)
            if not self._estimates or not self._check_out(session.baseline):
                return
            self._measure(items, Stage.FIRST, self._end(1.0))
        for repeat in range(REPEATS if session.options.max_seconds else 0):
            found, end = self.rows, self._end(1.0, least=0.0 if repeat else LEAST_TIME)
            still_open = {row.key.pair for row in found if row.open}
            if needs_no_repeat(found) or any(row.certain for row in found) or only_the_machine_changed(found):
                break
            if repeat and time.monotonic() > end:
                self._note_late(len(still_open))
                break
            self._measure(items, Stage.REPEAT, end)

    def _end(self, fraction: float, least: float = LEAST_TIME) -> float:
        """Return when a fraction of `--max-seconds` is over, but at least the fraction `least` from now."""
        seconds = self._session.options.max_seconds
        return max(self._session.outcomes.begun + fraction * seconds, time.monotonic() + least * seconds)

    @property
    def rows(self) -> list[Row]:
        return rows(self._estimates, self._settings, self._tested)

    # --- comparing

    def _compare_stored(self, baseline: Baseline) -> None:
        session = self._session
        self._settings = session.settings.comparing(session.options.slower_ratio)
        metrics = {test: measure.metrics for test, measure in session.measures.items()}
        self._estimates += stored_estimates(
            baseline.measured, session.measured(), self._settings, baseline.metrics, metrics
        )
        self._estimates += stored_copy(baseline.copied, self._copied, self._settings)

    def _check_out(self, baseline: Baseline) -> bool:
        """Return whether the stored run's code can be measured; if not, note the reason."""
        session = self._session
        try:
            self._sides = session.options.sides or stored_sides(
                baseline, session.storage.root, session.options, session.cleanup
            )
        except Refused as refused:
            why, _, advice = str(refused).rpartition("; ")
            what = f"this run cannot be compared with the stored run's code, because {why}"
            self._problems.append(Reason(what, advice))
        return self._sides is not None

    def _add(self, measuring: Measuring, stage: Stage, *, controls: bool = True) -> None:
        """Add the estimates of an A/B measurement, and of control measurements on its process sets."""
        estimates = self._ab_estimates(measuring, stage)
        self._estimates += estimates
        if stage is not Stage.FIRST or not controls:
            return
        if estimates:
            measured = measuring.measured()
            found, problems = measure_controls(measuring.pool, measured, estimates, self._settings)
            self._estimates += found
            self._problems += problems
        elif any(entry.tests for entry in self._estimates):
            self._problems.append(NO_STEP)

    def _ab_estimates(self, measuring: Measuring, stage: Stage) -> list[Estimates]:
        metrics = {test: measure.metrics for test, measure in measuring.measures.items()}
        return ab_estimates(measuring.measured(), metrics, self._settings, stage)

    # --- measuring

    def _measure(self, items: Sequence[pytest.Item], stage: Stage, until: float) -> None:
        """Measure the open pairs A/B on new processes, as many as have time.

        until: the time.monotonic() value at which the measurements should have ended. A first measurement
        leaves a quarter of the time if it shows that there is no PASS, whatever the others show.
        """
        session, options, sets = self._session, self._session.options, self._settings.first_sets
        rounds = options.rounds
        if session.baseline is not None and "--rounds" not in options.given:
            rounds = COMPARISON_ROUNDS
        by_pair = tests_by_pair(session.measured())
        if stage is Stage.REPEAT:
            rounds = 2 * rounds  # a script is run only as often as before: it takes long to start
            if not all(isinstance(pair.base, ScriptSpec) for pair in by_pair):
                sets = self._settings.repeat_sets
        measuring = session.begin_pass(self._sides, sets, rounds, time_only=True)
        found = self.rows
        exact = {test for row in found if row.open and row.key.exact for test in row.tests}
        measuring.whole = exact
        tests = {pair: self._test_of(of_pair, exact) for pair, of_pair in by_pair.items()}
        seconds = {pair: self._expected_seconds(measuring, test) for pair, test in tests.items()}
        plan = next_plan(found, seconds, until - time.monotonic())
        if stage is Stage.REPEAT:
            self._tested |= plan.tested
        left, no_pass, interrupted, early = 0, False, True, self._end(0.75)

        def is_over() -> bool:
            if (now := time.monotonic()) <= early or stage is not Stage.FIRST:
                return now > until
            by_now = rows([*self._estimates, *self._ab_estimates(measuring, stage)], self._settings)
            return now > until or any(row.moved for row in by_now)  # the stored code is slower, too

        try:
            left = self._run(items, [tests[pair] for pair in plan.pairs], is_over)
            no_pass = left > 0 and time.monotonic() < until  # it ended early
            interrupted = False
        finally:  # if this is interrupted, judge what was measured
            stored = {test: measuring.measures[test].to_json() for test in measuring.measured()}
            self._stages.append({"stage": stage, "tests": stored})
            self._add(measuring, stage, controls=not interrupted)
            self._note_late(0 if interrupted else left + plan.left, no_pass=no_pass)

    def _note_late(self, left: int, *, no_pass: bool = False) -> None:
        """Note how many measurements were left out. no_pass: because the others had shown enough."""
        seconds, many = self._session.options.max_seconds, counted(left, "measurement")
        late = Reason(
            f"--max-seconds {seconds:.0f} left no time for {many}",
            f"give it more time: --max-seconds {max(60, 2 * seconds):.0f}",
        )
        if no_pass:
            late = Reason(f"{many} left out, because no PASS was possible", "")
        self._late = [late] if left else []

    def _run(self, items: Sequence[pytest.Item], tests: Sequence[str], is_over: Callable[[], bool]) -> int:
        """Run tests on the processes that have just begun, and return how many had no time left."""
        by_test = {item.nodeid: item for item in items}
        for place, test in enumerate(tests):
            if place and is_over():
                return len(tests) - place
            self._session.progress.stage = f"comparison {place + 1} of {len(tests)}"
            for report in runtestprotocol(by_test[test], log=False):
                if report.failed:  # the first measurement reported everything else
                    measure = self._session.passes[-1].measures.get(test)
                    if measure is None or not measure.base_failed:  # the base may have failed before
                        report.keywords = {word: 1 for word in report.keywords if word != "base_failed"}
                    by_test[test].ihook.pytest_runtest_logreport(report=report)
        return 0

    def _test_of(self, tests: Sequence[str], exact: Collection[str]) -> str:
        """Return the test that measures a pair again: of equal ones, that with the fewest references.

        exact: tests with an open exact metric, such as bytes, which only they can measure again.
        """
        measures = self._session.measures
        return min(tests, key=lambda test: (test not in exact, len(measures[test].references)))

    def _expected_seconds(self, measuring: Measuring, test: str) -> float:
        """Return about how long the new processes take for a test, from its first measurement."""
        measure = self._session.measures[test]
        assert measure.measured is not None
        overhead = self._session.outcomes.seconds[test] - measure.counted_seconds
        return overhead + measuring.pool.expected_seconds(measure.measured)

    # --- the reasons

    def _explain(self) -> None:
        """Find out why measurements got slower, on the live process sets. The answer stays as it is."""
        found, session = self.rows, self._session
        worse = {
            row.key.pair: row
            for row in sorted(found, key=lambda row: -row.ratio)
            if row.finding is Finding.WORSE and row.key.pair is not None
            if row.key.metric in ("time", "mean_time") and row.key.control is None
        }
        if self._sides is None or not worse or untrusted(found, self._estimates):
            return
        if not session.options.max_seconds:  # as in the steps of a bisection
            return
        slower = [
            Slower.of(row.tests, pair.base, pair.candidate, (row.base + row.candidate) / 2)
            for pair, row in worse.items()
        ]
        began = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        folder = session.storage.root / ".ddpperf" / "traces" / began
        try:
            if session.options.nodes > 1:
                raise Refused("ranks of several nodes are not traced")
            pool = session.passes[-1].pool

            def stage(text: str) -> None:
                session.progress.stage = text

            self._why = explain(pool, slower, folder, stage)
            self._differ = differences_of(self._sides.base, self._sides.candidate, session.storage.root)
        except Exception as error:
            self._why.append({"tests": [*slower[0].tests], "problem": first_line(error)})

    # --- the answer

    def answer(self, outcomes: Mapping[str, Outcome]) -> Answer | None:
        """Return the result of the comparison; None if nothing is compared. outcomes: how each test ended."""
        session, baseline = self._session, self._session.baseline
        if baseline is None and self._sides is None:
            return None
        if not self._estimates:  # the run was interrupted, or measured nothing
            if baseline is not None:
                self._compare_stored(baseline)
            elif session.passes:
                self._add(session.passes[0], Stage.FIRST, controls=False)
        cannot = [test for test, outcome in outcomes.items() if outcome.kind is OutcomeKind.CANDIDATE_CANNOT]
        missing = {
            test: entry.missing
            for entry in self._estimates
            for test in entry.tests
            if entry.limits and entry.missing
        }
        problems = [*self._problems]
        if baseline is None and not self._estimates:
            what = "base and candidate were not compared: no test measured both"
            problems.append(Reason(what, "select a test that both can measure"))
        if baseline is not None:
            expected = session.collection.expected(baseline.measured)
            missing |= stored_missing(baseline.measured, session.measured(), expected, baseline.path.name)
        context = Context(
            compared_with=baseline.path.name if baseline is not None else "",
            missing=missing,
            cannot=cannot,
            problems=problems,
            late=self._late,
            differences=differences(baseline.environment, session.environment()) if baseline else (),
            new=self._new(),
        )
        return answer_of(self.rows, self._estimates, context)

    def _new(self) -> list[str]:
        baseline = self._session.baseline
        return [] if baseline is None else sorted(self._session.measured().keys() - baseline.measured.keys())

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"copied": self._copied and self._copied.to_json()}
        if self._session.baseline is not None:
            fields["compared_with"] = self._session.baseline.path.name
        elif self._sides is None:
            return fields
        pools = [measuring.pool for measuring in self._session.passes if measuring.sides is not None]
        found = {side: pool.environment(side) for pool in pools for side in (BASE, CANDIDATE)}
        versions = {side: {name: ranks.get(name) for name in VERSIONS} for side, ranks in found.items()}
        judged = {
            "sides": self._sides and self._sides.to_json(versions),
            "rows": [row.to_json() for row in self.rows],
            "stages": self._stages,
            "settings": asdict(self._settings),
            "why": self._why,
            "differ": self._differ,
            "late": " ".join(reason.text for reason in self._late),
            "new": self._new(),
        }
        return fields | {"judged": judged}
