"""The judge of a run that may be compared with a stored run, in two steps: screening and confirmation.

The screening compares all times with the stored run. The confirmation is an A/B run of the stored
run's code and this code. It measures the tests that look slower or are too imprecise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ddpperf.errors import Refused
from ddpperf.plugin.ab_judge import ABJudge
from ddpperf.plugin.base_checkout import stored_sides
from ddpperf.plugin.control_steps import copied, positive_control
from ddpperf.plugin.session import Session
from ddpperf.results.outcomes import Outcome
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import Baseline
from ddpperf.specs import Spec
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.run_verdict import Answer
from ddpperf.verdict.stored_run_comparison import Comparison, Controls, Reference, compare, negative_control
from ddpperf.workers.pool import Pool

INCOMPARABLE = {"commit", "gpus", "pinning", "hostname", "links", "nodes"}  # facts of an environment


class StoredRunJudge:
    """Compares the step times of a run with a stored run, and makes control measurements."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._copied: Measured | None = None
        self._comparison: Comparison | None = None  # None before the screening, or without a stored run
        self._confirmation: ABJudge | None = None  # None before the confirmation
        # Why not every test was compared with the stored run's code; empty if all were
        self._unconfirmed = "the run was interrupted before they were compared with the stored run's code"
        self._no_stored_code = ""  # why the stored run's code cannot run

    def judge(self, items: Sequence[pytest.Item]) -> None:
        """Compare the first measurements with the stored run, if any, and confirm what looks slower."""
        session = self._session
        pool = session.passes[0].pool
        self._copied = copied(pool, session.options.device)
        if session.baseline is not None:
            comparison = self._screen(session.baseline, pool)
            tests = comparison.to_confirm()
            self._unconfirmed = self._confirm(comparison, session.baseline, items, tests) if tests else ""

    def _screen(self, baseline: Baseline, pool: Pool | None = None) -> Comparison:
        """Compare step times with the stored run, and make the positive control in `pool`."""
        session, measured = self._session, self._session.measured()
        reference = Reference(
            baseline=baseline,
            settings=session.settings,
            device=session.options.device,
            limit=session.options.slower_ratio,
            history=session.storage.history(baseline),
        )
        compared = compare(measured, reference, session.collection.expected(baseline.measured))
        controls = Controls(
            negative=negative_control(self._copied, reference, compared=len(compared.changes)),
            positive=positive_control(compared, measured, pool) if pool is not None else "",
        )
        self._comparison = replace(compared, controls=controls)
        return self._comparison

    def _confirm(
        self, comparison: Comparison, baseline: Baseline, items: Sequence[pytest.Item], tests: Sequence[str]
    ) -> str:
        """Measure tests in an A/B run of the stored run's code and this code.

        tests: suspected regressions, and every test that is too imprecise to notice a slow-down as
        large as its tolerance. The most suspicious test comes first. Returns why not every test was
        measured; empty if all were.
        """
        session = self._session
        options, root = session.options, session.storage.root
        try:
            sides = options.sides or stored_sides(baseline, root, options, session.cleanup)
        except Refused as refused:
            self._no_stored_code = f"they cannot be compared with the stored run's code, because {refused}"
            return ""
        same_work, slower = self._same_work(), comparison.looks_slower
        decides = Counter(same_work[test] for test in tests)  # how many tests a measurement decides
        in_order = sorted(tests, key=lambda test: -math.inf if test in slower else -decides[same_work[test]])
        settings = session.settings.beside_stored_code(options.device)
        self._confirmation = ABJudge(session, sides, settings, confirms=comparison, same_work=same_work)
        return self._confirmation.confirm(items, in_order)

    def _same_work(self) -> dict[str, str]:
        """Return for each measured test the test with an equal spec that needs the fewest references."""
        specs = {test: measured.spec for test, measured in self._session.measured().items()}
        cheapest: dict[Spec, str] = {}
        for test in sorted(specs, key=lambda test: len(self._session.measures[test].references)):
            cheapest.setdefault(specs[test], test)
        return {test: cheapest[spec] for test, spec in specs.items()}

    def answer(self, outcomes: Mapping[str, Outcome]) -> Answer | None:
        """Return the result of comparing with the stored run; None if there is no stored run."""
        baseline, confirmation = self._session.baseline, self._confirmation
        if baseline is None:
            return None
        return answer_of(
            self._comparison or self._screen(baseline),  # the run was interrupted, or measured nothing
            confirmation.decision if confirmation is not None else None,
            problems=confirmation.problems if confirmation is not None else (),
            unconfirmed=self._unconfirmed,
            no_stored_code=self._no_stored_code,
            differences=differences(baseline.environment, self._session.environment()),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the negative control, the comparison and its confirmation as JSON, as they are stored."""
        fields: dict[str, Any] = {"copied": self._copied and self._copied.to_json()}
        if self._comparison is not None:
            fields["compared_with"] = self._comparison.baseline
            fields["comparison"] = self._comparison.to_json()
        if self._confirmation is not None and self._confirmation.decision is not None:
            fields["confirmed"] = self._confirmation.sides_json()
        return fields


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between the environments of two stored runs, except for the commit."""
    found = []
    for name in sorted(then.keys() & now.keys() - INCOMPARABLE):
        pair = (then[name], now[name])
        before, after = pair if all(isinstance(one, dict) for one in pair) else ({name: one} for one in pair)
        for key in sorted(before.keys() | after.keys()):
            was, is_now = before.get(key, "not set"), after.get(key, "not set")
            if was != is_now:
                found.append(f"{key} was {was}, is {is_now}")
    return found
