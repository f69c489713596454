"""The judge of an A/B run, which measures suspected and undecided tests again.

A test is open if it is suspected to be worse or undecided. Each repeated measurement takes new
processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from math import log1p
from types import MappingProxyType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from ddpperf.io.secret_values import shown_value
from ddpperf.plugin.control_steps import ab_controls
from ddpperf.plugin.measure_fixture import Measuring
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.plugin.session import Session
from ddpperf.results.outcomes import Outcome, OutcomeKind
from ddpperf.results.units import counted
from ddpperf.verdict.ab import Decision, ab_answer
from ddpperf.verdict.estimates import MetricEstimates, estimates_of
from ddpperf.verdict.run_verdict import Answer
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.stored_run_comparison import Comparison
from ddpperf.verdict.two_stage_test import LOOKS, Finding

# Of each process set in an A/B run with the stored run's code, where the time is short
CONFIRMATION_ROUNDS = 6


class ABJudge:
    """Compares base and candidate, and measures suspected and undecided tests again, at most twice.

    confirms: the comparison with a stored run whose findings this A/B run confirms; None for an A/B
    run that the user asked for. It says which tests are suspected, and how much each may change.
    same_work: for each test, the test that is measured in its place because its spec is equal. By
    default, every test is measured.
    """

    def __init__(
        self,
        session: Session,
        sides: Sides,
        settings: DecisionSettings,
        *,
        confirms: Comparison | None = None,
        same_work: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.decision: Decision | None = None  # None before the first measurement was compared
        self.problems: list[str] = []  # what this A/B run could not do
        self._session = session
        self._sides = sides
        self._settings = settings
        self._confirms = confirms
        self._same_work = same_work
        self._late = ""  # why open tests were not measured again
        self._looks: dict[str, list[Any]] = {}  # by test id, the stored later measurements
        self._torch: dict[str, str] = {}  # the version of torch, by side

    def judge(self, items: Sequence[pytest.Item]) -> None:
        """Compare base and candidate, and measure suspected and undecided tests again."""
        self._late = self._look_again(items, self._compare(self._session.passes[0]))

    def confirm(self, items: Sequence[pytest.Item], tests: Sequence[str]) -> str:
        """Measure tests in base and candidate, compare the two, and repeat suspected and undecided tests.

        Returns why not every test was measured; empty if all were.
        """
        until = time.monotonic() + self._session.options.max_seconds / 2
        measuring = self._begin_pass(self._settings.default.screen_sets)
        try:
            left = self._measure(items, tests, until)
            decision = self._compare(measuring)
        except KeyboardInterrupt:
            self._compare(measuring, controls=False).end()
            raise
        late = self._look_again(items, decision)
        return self._no_time(left) or late

    def _no_time(self, left: int) -> str:
        """Return a sentence on the measurements that --max-seconds left out; empty if there are none."""
        given = f"--max-seconds {self._session.options.max_seconds:.0f}"
        return f"{given} left no time for {counted(left, 'measurement')}; pass more seconds" if left else ""

    def answer(self, outcomes: Mapping[str, Outcome]) -> Answer:
        """Return the result of comparing base and candidate. outcomes: how each test ended."""
        if self.decision is None:
            return ab_answer((), {}, problems=["base and candidate were not compared: no test measured both"])
        cannot = [test for test, outcome in outcomes.items() if outcome.kind is OutcomeKind.CANDIDATE_CANNOT]
        rows, missing = self.decision.rows, self.decision.missing
        return ab_answer(rows, missing, problems=self.problems, unmeasured=cannot)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that an A/B run adds to the stored JSON file."""
        return {"against": self.sides_json()}

    def sides_json(self) -> dict[str, Any]:
        """Return JSON that describes base, candidate and the results of their comparison."""
        base, candidate = (
            {
                "python": side.python,
                "root": side.root and str(side.root),
                "environment": {name: shown_value(name, value) for name, value in side.environment.items()},
                "torch": self._torch.get(side.name),
            }
            for side in (self._sides.base, self._sides.candidate)
        )
        return {
            "base": base,
            "candidate": candidate | {"spec": dict(self._sides.spec_fields)},
            "settings": asdict(self._settings),
            "rows": [asdict(row) for row in self.decision.rows] if self.decision is not None else [],
            "confirmation": self._looks,
            "late": self._late,
        }

    # --- comparing

    def _compare(self, measuring: Measuring, *, controls: bool = True) -> Decision:
        """Compare base and candidate of every test for the first time.

        controls: whether to make the control measurements before.
        """
        estimates = self._estimates(measuring)
        tests = measuring.measured()
        if controls:
            found, failures = ab_controls(measuring.pool, tests, estimates, self._session.options.device)
            estimates += found
            self.problems += failures
        fields = self._sides.spec_fields
        if fields and not any(measured.candidate_spec for measured in tests.values()):
            given = ", ".join(f"{name}={value}" for name, value in fields.items())
            self.problems.append(f"--candidate {given} changes no test of this run")
        suspected = self._confirms.looks_slower if self._confirms is not None else ()
        self.decision = Decision(estimates, self._settings, suspected)
        return self.decision

    def _look(self, decision: Decision, measuring: Measuring) -> None:
        """Decide suspected and undecided tests by their newest measurement."""
        for test, measure in measuring.measures.items():
            if measure.measured is not None:
                self._looks.setdefault(test, []).append(measure.to_json())
        decision.look(self._estimates(measuring))

    def _has_worse(self, decision: Decision, measuring: Measuring) -> bool:
        """Return whether a measurement that `_look` has not judged yet finds a test worse."""
        decision = deepcopy(decision)
        decision.look(self._estimates(measuring))
        return any(row.confirmed and row.gated and row.finding is Finding.WORSE for row in decision.rows)

    def _estimates(self, measuring: Measuring) -> list[MetricEstimates]:
        estimates, device = [], self._session.options.device
        for test, measured in measuring.measured().items():
            self._torch |= {sample.side: sample.torch for sample in measured.samples}
            estimates += estimates_of(test, measured, measuring.measures[test].metrics, device)
            for other, in_its_place in self._same_work.items():
                if in_its_place == test != other:
                    estimates += estimates_of(other, measured, {}, device)
        changes = self._confirms.changes if self._confirms is not None else {}
        return [
            replace(entry, tolerance=log1p(changes[entry.test].tolerance))
            if entry.metric == "time" and entry.test in changes
            else entry
            for entry in estimates
        ]

    # --- measuring again

    def _look_again(self, items: Sequence[pytest.Item], decision: Decision) -> str:
        """Measure suspected and undecided tests again in new processes, at most twice.

        The first repeat of an A/B run that the user asked for has no time limit until a test is worse.
        The first repeat of a confirmation has at least half of its seconds. Returns a sentence on the
        measurements that had no time left; empty if there are none.
        """
        seconds = self._session.options.max_seconds
        late, end = 0, self._session.outcomes.begun + seconds
        asked_for = self._confirms is None
        first_end = end if asked_for else max(end, time.monotonic() + seconds / 4)
        try:
            for look in range(LOOKS):
                if not (tests := decision.open_tests()):
                    break
                until, may_go_on = end if look else first_end, asked_for and not look
                if time.monotonic() > until and not may_go_on:
                    late = len(tests)
                    break
                measuring = self._begin_pass(self._settings.default.confirm_sets)
                is_enough = partial(self._has_worse, decision, measuring) if may_go_on else None
                try:
                    late = self._measure(items, tests, until, is_enough)
                finally:  # if this is interrupted, judge what was measured
                    self._look(decision, measuring)
        finally:
            decision.end()
        return self._no_time(late)

    def _begin_pass(self, sets: int) -> Measuring:
        options, confirming = self._session.options, self._confirms is not None
        rounds = CONFIRMATION_ROUNDS if confirming and "--rounds" not in options.given else options.rounds
        return self._session.begin_pass(self._sides, sets, rounds, time_only=confirming)

    def _measure(
        self,
        items: Sequence[pytest.Item],
        tests: Sequence[str],
        until: float,
        is_enough: Callable[[], bool] | None = None,
    ) -> int:
        """Measure tests in the processes that have just begun, and return how many tests had no time left.

        until: the time.monotonic() value at which the measurements should have ended. After the first
        test, a test is left out if it would take longer. is_enough: whether the measurements so far
        are enough. Until then, no test is left out.
        """
        by_test, left = {item.nodeid: item for item in items}, 0
        tests = list(dict.fromkeys(self._same_work.get(test, test) for test in tests))
        for place, test in enumerate(tests):
            would_end = time.monotonic() + (self._expected_seconds(test) if place else 0.0)
            if would_end > until and (is_enough is None or is_enough()):
                left += 1
                continue
            self._session.progress.stage = f"comparison {place + 1} of {len(tests)}"
            for report in runtestprotocol(by_test[test], log=False):
                if report.failed:  # the first measurement reported everything else
                    by_test[test].ihook.pytest_runtest_logreport(report=report)
        return left

    def _expected_seconds(self, test: str) -> float:
        """Return about how long the new processes take for a test, from its first measurement.

        A test takes no time, which is minus infinity, if these processes have just done its work.
        """
        first, newest = self._session.passes[0], self._session.passes[-1]
        measure, pool = first.measures[test], newest.pool
        measured, references = measure.measured, measure.references
        if measured is None:
            return 0.0
        done = ((other.spec, other.candidate_spec) for other in newest.measured().values())
        if (measured.spec, measured.candidate_spec) in done:
            return -math.inf
        overhead = self._session.outcomes.seconds[test] - measure.counted_seconds
        timed = [measured, *(() if pool.options.time_only else references.values())]
        return overhead + sum(map(pool.expected_seconds, timed))
