"""Test runs that measure only this environment and may be compared with a stored run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ddpperf.machine.hardware import differences
from ddpperf.plugin.ab_run import ABRun
from ddpperf.plugin.control_steps import copied, positive_control
from ddpperf.plugin.measure_fixture import Measuring
from ddpperf.plugin.options.options import Options
from ddpperf.plugin.run_inputs import RunInputs
from ddpperf.results.samples import Measured
from ddpperf.verdict.confirmed_comparison import answer_of
from ddpperf.verdict.exit_status import Answer
from ddpperf.verdict.stored_run_comparison import Comparison, Controls, Reference, compare, negative_control
from ddpperf.workers.pool import Pool


class PlainRun:
    """Compares the step times of a run with a stored run, and makes control measurements.

    confirmation: the A/B run of the stored run's code and this code; None before it began.
    unconfirmed: why not every test was measured beside the stored run's code; empty if all were.
    no_stored_code: why the stored run's code cannot run; empty if it can.
    comparison: None before the comparison, or without a stored run.
    """

    sides = None

    def __init__(self, options: Options, inputs: RunInputs) -> None:
        self.replicates = options.replicates or 1
        self.rounds = options.rounds
        self.comparison: Comparison | None = None
        self.confirmation: ABRun | None = None
        self.unconfirmed = "the run was interrupted before they were measured beside the stored run's code"
        self.no_stored_code = ""
        self._options = options
        self._inputs = inputs
        self._copied: Measured | None = None

    def screen(self, measuring: Measuring, expected: Collection[str]) -> list[str]:
        """Compare step times with a stored run, and return the ids of the tests to confirm.

        The control measurements are made, too. The most suspicious test comes first.
        expected: ids of the tests that have to be compared.
        """
        self._copied = copied(measuring.pool, self._options.device)
        self._compare(measuring.measured(), expected, measuring.pool)
        return self.comparison.to_confirm() if self.comparison is not None else []

    def answer(
        self, measured: Mapping[str, Measured], expected: Collection[str], environment: Mapping[str, Any]
    ) -> Answer | None:
        """Return the result of comparing with the stored run; None if there is no stored run.

        environment: the environment of this run, as it is stored.
        """
        if self.comparison is None:  # the run was interrupted, or measured nothing
            self._compare(measured, expected)
        if self.comparison is None or self._inputs.baseline is None:
            return None
        confirmation = self.confirmation
        return answer_of(
            self.comparison,
            confirmation.decision if confirmation is not None else None,
            problems=confirmation.problems if confirmation is not None else (),
            unconfirmed=self.unconfirmed,
            no_stored_code=self.no_stored_code,
            differences=differences(self._inputs.baseline.environment, environment),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the negative control and the confirmation as JSON, as they are stored."""
        fields = {"copied": self._copied and self._copied.to_json()}
        if self.confirmation is not None and self.confirmation.decision is not None:
            fields["confirmed"] = self.confirmation.sides_json()
        return fields

    def _compare(
        self, measured: Mapping[str, Measured], expected: Collection[str], pool: Pool | None = None
    ) -> None:
        """Compare step times with the stored run, if any, and make the positive control in `pool`."""
        baseline = self._inputs.baseline
        if baseline is None:
            return
        reference = Reference(
            baseline=baseline,
            settings=self._inputs.settings,
            device=self._options.device,
            limit=self._options.slower_ratio,
            history=self._inputs.storage.history(baseline),
        )
        compared = compare(measured, reference, expected)
        controls = Controls(
            negative=negative_control(self._copied, reference, compared=len(compared.changes)),
            positive=positive_control(compared, measured, pool) if pool is not None else "",
        )
        self.comparison = replace(compared, controls=controls)
