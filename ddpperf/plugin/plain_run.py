"""Test runs that measure only this environment and may be compared with a stored run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.control_measurements import StoredControls
from ddpperf.plugin.measuring_pass import Measuring
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.results.stored_runs import Baseline, Storage
from ddpperf.verdict.ab import ab_answer, confirmed_answer
from ddpperf.verdict.exit_status import Answer
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.stored_run_comparison import Comparison, Reference, compare, negative_control


class PlainRun:
    """Compares the step times of a run with a stored run, and makes control measurements.

    baseline: the stored run; None without --benchmark-compare, or if no stored run was found.
    confirmation: measures suspected regressions again beside the stored run's code; None without
    --baseline-root and --baseline-python.
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
        self.baseline = baseline
        self.confirmation = confirmation
        self.comparison: Comparison | None = None
        self.controls = StoredControls(options.device)
        self._limit = options.slower_ratio
        self._settings = settings
        self._storage = storage

    @cached_property
    def _reference(self) -> Reference:
        assert self.baseline is not None
        history = self._storage.history(self.baseline)
        return Reference(baseline=self.baseline, settings=self._settings, limit=self._limit, history=history)

    def judge(self, measuring: Measuring, expected: Collection[str]) -> list[str]:
        """Compare step times with a stored run, and return the ids of tests to measure again.

        The control measurements are made, too.
        expected: ids of the tests that have to be compared.
        """
        self.controls.copy(measuring.pool())
        compared = self._compare(measuring.measured(), expected)
        if compared is not None:
            self.controls.slow_down(compared, measuring.measured(), measuring.pool())
            self.comparison = self._controlled(compared)
        return self._suspects() if self.confirmation is not None else []

    def confirm(self, measuring: Measuring) -> None:
        """Decide which suspected regressions are real, by comparing with the stored run's code."""
        if self.confirmation is not None:
            self.confirmation.confirm_suspects(measuring, self._suspects())

    def answer(
        self, measured: Mapping[str, Measured], expected: Collection[str], cannot: Sequence[str]
    ) -> Answer | None:
        """Return the result of comparing with the stored run; None if there is no stored run.

        cannot: not used, because only A/B runs have a candidate.
        """
        del cannot
        if self.comparison is None and (compared := self._compare(measured, expected)) is not None:
            self.comparison = self._controlled(compared)  # of a run that was interrupted, or measured nothing
        if self.comparison is None:
            return None
        answer, suspects = self.comparison.answer(), self._suspects()
        if self.confirmation is None or not suspects:
            return answer
        missing = dict.fromkeys(suspects, "was to be measured beside the stored run's code, and was not")
        judged = self.confirmation.answer({}, (), ()) if self.confirmation.decided else ab_answer((), missing)
        return confirmed_answer(answer, judged, baseline=self.comparison.baseline, suspects=suspects)

    def to_json(self) -> dict[str, Any]:
        """Return the control measurement and the second measurements, as stored as JSON."""
        copied = {"copied": self.controls.copied and self.controls.copied.to_json()}
        if self.confirmation is None or not self.confirmation.decided:
            return copied
        return copied | {"confirmed": self.confirmation.sides_json()}

    def _suspects(self) -> list[str]:
        """Return the ids of tests that are or look slower than in the stored run."""
        return [*self.comparison.slower, *self.comparison.suspects] if self.comparison is not None else []

    def _compare(self, measured: Mapping[str, Measured], expected: Collection[str]) -> Comparison | None:
        if self.baseline is None:
            return None
        return compare(measured, self._reference, expected)

    def _controlled(self, compared: Comparison) -> Comparison:
        negative = negative_control(self.controls.copied, self._reference, compared=len(compared.changes))
        return replace(compared, controls=self.controls.beside(negative))
