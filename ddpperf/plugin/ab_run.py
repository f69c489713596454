"""The comparison of base and candidate in an A/B run, which measures them in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from math import log1p
from types import MappingProxyType
from typing import Any

from ddpperf.io.secret_values import shown_value
from ddpperf.plugin.control_steps import ab_controls
from ddpperf.plugin.measure_fixture import Measuring
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.verdict.ab import Decision, ab_answer
from ddpperf.verdict.estimates import MetricEstimates, estimates_of
from ddpperf.verdict.exit_status import Answer
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.stored_run_comparison import Comparison
from ddpperf.verdict.two_stage_test import Finding


class ABRun:
    """Compares base and candidate, and says which tests must be measured again.

    The first measurement uses a few process sets per side. Later measurements use new process sets.
    The confirmation of a comparison with a stored run also makes an ABRun.

    confirms: the comparison with a stored run whose findings this run confirms; None for an A/B run
    that the user asked for. It says which tests are suspected, and how much each may change.
    comparison: always None, because an A/B run is not compared with a stored run.
    rounds: number of rounds of each test on each process set.
    sides: the interpreters, code and options of base and candidate.
    same_work: for each test, the test that is measured in its place because its work is equal. Each
    test is measured by itself by default.
    decision: the findings; None before the first measurement was compared.
    problems: what this A/B run could not do.
    late: a sentence on the tests that were not measured again in time; empty if there are none.
    """

    comparison: Comparison | None = None

    def __init__(
        self,
        sides: Sides,
        settings: DecisionSettings,
        device: str,
        *,
        rounds: int,
        confirms: Comparison | None = None,
        same_work: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.sides = sides
        self.rounds = rounds
        self.decision: Decision | None = None
        self.problems: list[str] = []
        self.late = ""
        self._confirms = confirms
        self._same_work = same_work
        self._device = device
        self._settings = settings
        self._looks: dict[str, list[Any]] = {}  # by test id, the stored later measurements
        self._torch: dict[str, str] = {}  # the version of torch, by side

    @property
    def replicates(self) -> int:
        """The number of process sets per side in the first measurement of each test."""
        return self._settings.default.screen_sets

    @property
    def look_replicates(self) -> int:
        """The number of process sets per side in each later measurement."""
        return self._settings.default.confirm_sets

    def different(self, tests: Sequence[str]) -> list[str]:
        """Return the tests to measure, so that all the given tests can be compared."""
        return list(dict.fromkeys(self._same_work.get(test, test) for test in tests))

    def judge(self, measuring: Measuring, *, controls: bool = True) -> list[str]:
        """Compare base and candidate of every test, and return the ids of tests to measure again.

        controls: whether to make the control measurements before.
        """
        estimates = self._estimates(measuring)
        tests = measuring.measured()
        if controls:
            found, failures = ab_controls(measuring.pool, tests, estimates, self._device)
            estimates += found
            self.problems += failures
        if self.sides.spec_fields and not any(measured.candidate_spec for measured in tests.values()):
            fields = ", ".join(f"{name}={value}" for name, value in self.sides.spec_fields.items())
            self.problems.append(f"--candidate {fields} changes no test of this run")
        suspected = self._confirms.looks_slower if self._confirms is not None else ()
        self.decision = Decision(estimates, self._settings, suspected)
        return self.decision.open_tests()

    def look(self, measuring: Measuring) -> list[str]:
        """Decide tests by their newest measurement, and return the tests to measure again."""
        assert self.decision is not None
        for test, measure in measuring.measures.items():
            if measure.record.measured is not None:
                self._looks.setdefault(test, []).append(measure.record.to_json())
        self.decision.look(self._estimates(measuring))
        return self.decision.open_tests()

    def has_worse(self, measuring: Measuring) -> bool:
        """Return whether a measurement that `look` has not judged yet finds a test worse."""
        decision = deepcopy(self.decision)
        assert decision is not None
        decision.look(self._estimates(measuring))
        return any(row.confirmed and row.gated and row.finding is Finding.WORSE for row in decision.rows)

    def end(self) -> None:
        """Stop measuring, and list suspected tests that could not be measured again as missing."""
        if self.decision is not None:
            self.decision.end()

    def answer(self, cannot: Sequence[str] = ()) -> Answer:
        """Return the result of comparing base and candidate.

        cannot: ids of the tests that the base can measure and the candidate cannot.
        """
        if self.decision is None:
            return ab_answer((), {}, problems=["base and candidate were not compared: no test measured both"])
        rows, missing = self.decision.rows, self.decision.missing
        return ab_answer(rows, missing, problems=self.problems, unmeasured=cannot)

    def _estimates(self, measuring: Measuring) -> list[MetricEstimates]:
        estimates = []
        for test, measured in measuring.measured().items():
            self._torch |= {sample.side: sample.torch for sample in measured.samples}
            estimates += estimates_of(test, measured, measuring.measures[test].metrics, self._device)
            for other, in_its_place in self._same_work.items():
                if in_its_place == test != other:
                    estimates += estimates_of(other, measured, {}, self._device)
        changes = self._confirms.changes if self._confirms is not None else {}
        return [
            replace(entry, tolerance=log1p(changes[entry.test].tolerance))
            if entry.metric == "time" and entry.test in changes
            else entry
            for entry in estimates
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the fields that an A/B run adds to the stored JSON file."""
        return {"copied": None, "against": self.sides_json()}

    def sides_json(self) -> dict[str, Any]:
        """Return JSON that describes base, candidate and the results of their comparison."""
        base, candidate = (
            {
                "python": side.python,
                "root": side.root and str(side.root),
                "environment": {name: shown_value(name, value) for name, value in side.environment.items()},
                "torch": self._torch.get(side.name),
            }
            for side in (self.sides.base, self.sides.candidate)
        )
        return {
            "base": base,
            "candidate": candidate | {"spec": dict(self.sides.spec_fields)},
            "settings": asdict(self._settings),
            "rows": [asdict(row) for row in self.decision.rows] if self.decision is not None else [],
            "confirmation": self._looks,
            "late": self.late,
        }
