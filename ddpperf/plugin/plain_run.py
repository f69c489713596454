"""Test runs that measure only this environment and may be compared with a stored run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.control_measurements import copied, positive_control
from ddpperf.plugin.measure_fixture import Measuring
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import Baseline, Storage
from ddpperf.verdict.ab import ab_answer, confirmed_answer
from ddpperf.verdict.exit_status import Answer
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.stored_run_comparison import Comparison, Controls, Reference, compare, negative_control
from ddpperf.workers.pool import Pool


class PlainRun:
    """Compares the step times of a run with a stored run, and makes control measurements.

    baseline: the stored run; None without --benchmark-compare, or if no stored run was found.
    confirmation: measures suspected regressions again beside the stored run's code; None without
    --baseline-root and --baseline-python.
    comparison: None before the comparison, or without a stored run.
    """

    sides = None

    def __init__(
        self,
        options: Options,
        settings: DecisionSettings,
        storage: Storage,
        baseline: Baseline | None,
        confirmation: ABRun | None,
    ) -> None:
        self.replicates = options.replicates or 1
        self.comparison: Comparison | None = None
        self._options = options
        self._settings = settings
        self._storage = storage
        self._baseline = baseline
        self._confirmation = confirmation
        self._copied: Measured | None = None

    def judge(self, measuring: Measuring, expected: Collection[str]) -> list[str]:
        """Compare step times with a stored run, and return the ids of tests that look slower.

        The control measurements are made, too.
        expected: ids of the tests that have to be compared.
        """
        self._copied = copied(measuring.pool, self._options.device)
        self._compare(measuring.measured(), expected, measuring.pool)
        return self._suspects()

    def answer(self, measured: Mapping[str, Measured], expected: Collection[str]) -> Answer | None:
        """Return the result of comparing with the stored run; None if there is no stored run."""
        if self.comparison is None:  # the run was interrupted, or measured nothing
            self._compare(measured, expected)
        if self.comparison is None:
            return None
        answer, suspects, confirmation = self.comparison.answer(), self._suspects(), self._confirmation
        if confirmation is None or not suspects:
            return answer
        missing = dict.fromkeys(suspects, "was to be measured beside the stored run's code, and was not")
        judged = confirmation.answer() if confirmation.decided else ab_answer((), missing)
        return confirmed_answer(answer, judged, baseline=self.comparison.baseline, suspects=suspects)

    def to_json(self) -> dict[str, Any]:
        """Return the control measurement and the second measurements, as stored as JSON."""
        fields = {"copied": self._copied and self._copied.to_json()}
        if self._confirmation is not None and self._confirmation.decided:
            fields["confirmed"] = self._confirmation.sides_json()
        return fields

    def _suspects(self) -> list[str]:
        return [*self.comparison.slower, *self.comparison.suspects] if self.comparison is not None else []

    def _compare(
        self, measured: Mapping[str, Measured], expected: Collection[str], pool: Pool | None = None
    ) -> None:
        """Compare step times with the stored run, if any, and make the positive control in `pool`."""
        if self._baseline is None:
            return
        reference = Reference(
            baseline=self._baseline,
            settings=self._settings,
            limit=self._options.slower_ratio,
            history=self._storage.history(self._baseline),
        )
        compared = compare(measured, reference, expected)
        negative = negative_control(self._copied, reference, compared=len(compared.changes))
        positive = Controls()
        if pool is not None:
            positive = positive_control(compared, measured, pool, self._options.device)
        controls = replace(
            positive, negative=negative.negative, missing=[*negative.missing, *positive.missing]
        )
        self.comparison = replace(compared, controls=controls)
