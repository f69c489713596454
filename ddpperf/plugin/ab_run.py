"""An A/B run: the base and the candidate are measured side by side, and compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from ddpperf.errors import first_line
from ddpperf.plugin.control_measurements import CANNOT_MEASURE, SLOW_DOWN, copy_spec, shortest, slowed
from ddpperf.plugin.measuring_pass import Measuring
from ddpperf.plugin.options.sides import Sides
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.results.stored_runs import Baseline
from ddpperf.verdict.ab import Decision, Row, ab_answer
from ddpperf.verdict.estimates import Control, MetricEstimates, estimates_of
from ddpperf.verdict.exit_status import Answer
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.stored_run_comparison import Comparison
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool


class ABRun:
    """Screens every test on a few process sets per side, and confirms suspects on fresh ones.

    A plain run has one, too, where it can measure its suspects beside the stored run's code. That
    one only confirms.
    """

    baseline: Baseline | None = None  # the stored run: none is compared with
    comparison: Comparison | None = None

    def __init__(
        self, sides: Sides, settings: DecisionSettings, device: str, *, replicates: int | None = None
    ) -> None:
        """replicates: process sets per side; None for those that the settings name."""
        self.sides = sides
        self._device = device
        self._settings = settings.with_sets(replicates) if replicates is not None else settings
        self._decision: Decision | None = None
        self._confirmed: dict[str, Any] = {}  # by test, what the confirmation stored
        self._sets_option = "--replicates"
        self._torch: dict[str, str] = {}  # by side
        self._problems: list[str] = []

    @property
    def replicates(self) -> int:
        """Process sets per side that screen a test."""
        return self._settings.default.screen_sets

    @property
    def confirmation_replicates(self) -> int:
        """Process sets per side that confirm a suspect."""
        return self._settings.default.confirm_sets

    @property
    def confirmation(self) -> ABRun:
        """What measures suspects again: this run itself."""
        return self

    @property
    def decided(self) -> bool:
        """Whether any test was compared."""
        return self._decision is not None

    def judge(self, measuring: Measuring, expected: Collection[str]) -> list[str]:
        """Measure the controls and screen every test; return the suspects.

        expected: of no use here, because every test has both sides.
        """
        del expected
        estimates = self._estimates(measuring)
        estimates += self._controls(measuring, estimates)
        specs = measuring.measured().values()
        if self.sides.spec_fields and not any(measured.candidate_spec for measured in specs):
            fields = ", ".join(f"{name}={value}" for name, value in self.sides.spec_fields.items())
            self._problems.append(f"no test measures anything that --against-spec {fields} changes")
        self._decision = Decision(estimates, self._settings)
        return self._decision.suspects()

    def confirm(self, measuring: Measuring) -> None:
        """Decide on the suspects by their measurements on fresh process sets."""
        assert self._decision is not None
        self._decision.confirm(self._estimates(measuring))
        self._keep(measuring)

    def confirm_suspects(self, measuring: Measuring, suspects: Sequence[str]) -> None:
        """Decide on the suspects of a comparison with a stored run, which were not screened."""
        estimates = self._estimates(measuring)
        estimates += self._controls(measuring, estimates)
        self._decision = Decision(estimates, self._settings, suspects_only=True)
        self._sets_option = "in perf/thresholds.toml confirm_sets ="
        judged = {row.test for row in self._decision.rows if row.primary and row.gated}
        for test in suspects:
            if test not in judged:
                self._decision.missing.setdefault(
                    test, "is a suspect, and two sides cannot judge what it stands for"
                )
        self._keep(measuring)

    def answer(
        self, measured: Mapping[str, Measured], expected: Collection[str], cannot: Sequence[str]
    ) -> Answer:
        """Return what was found. cannot: tests that only the candidate cannot measure."""
        del measured, expected
        if self._decision is None:
            return ab_answer((), {}, problems=["base and candidate were not compared: no test measured both"])
        return ab_answer(
            self.rows,
            self._decision.missing,
            problems=self._problems,
            unmeasured=cannot,
            sets_option=self._sets_option,
        )

    @property
    def rows(self) -> Sequence[Row]:
        """What was found for each metric of each test."""
        return self._decision.rows if self._decision is not None else ()

    def _estimates(self, measuring: Measuring) -> list[MetricEstimates]:
        self._torch |= {
            sample.side: sample.torch
            for measured in measuring.measured().values()
            for sample in measured.samples
        }
        return [
            metric
            for test, measured in measuring.measured().items()
            for metric in estimates_of(test, measured, measuring.measures[test].metrics, self._device)
        ]

    def _keep(self, measuring: Measuring) -> None:
        self._confirmed = {
            test: measure.stored for test, measure in measuring.measures.items() if measure.stored
        }

    # --- controls

    def _controls(self, measuring: Measuring, estimates: list[MetricEstimates]) -> list[MetricEstimates]:
        """Return the controls' estimates.

        A control that cannot be measured is one of the run's problems.
        """
        controls: list[Callable[[], list[MetricEstimates]]] = [
            lambda: self._copy(measuring.pool()),
            lambda: self._slow_down(measuring, estimates),
        ]
        found: list[MetricEstimates] = []
        for control in controls:
            try:
                found += control()
            except CANNOT_MEASURE as error:
                self._problems.append(f"a control could not be measured: {first_line(error)}")
        return found

    def _copy(self, pool: Pool) -> list[MetricEstimates]:
        """Measure a copy of memory on both sides: the negative control."""
        copied = pool.measure(copy_spec(self._device)).median_step_seconds()
        base, candidate = (_of_side(copied, side) for side in (BASE, CANDIDATE))
        return [_control("negative", base, candidate, "copy")]

    def _slow_down(self, measuring: Measuring, estimates: list[MetricEstimates]) -> list[MetricEstimates]:
        """Measure the candidate's shortest step with a delay and without: the positive control.

        Both are the candidate's, so that whatever it changed is in both, and the delay is judged as
        a change would be.
        """
        timed = {
            metric.test: metric
            for metric in estimates
            if metric.primary and metric.gated and metric.metric == "time"
        }
        measured = measuring.measured()
        test = shortest({test: mean(metric.base) for test, metric in timed.items()}, measured)
        if test is None:
            return []
        before = _of_side(measured[test].median_step_seconds(), CANDIDATE)
        delay = SLOW_DOWN[self._device] * mean(before.values())
        delayed = measuring.pool().measure(
            measured[test].spec, slowed(measured[test].spec_of(CANDIDATE), delay)
        )
        after = _of_side(delayed.median_step_seconds(), CANDIDATE)
        same_sets = {name: seconds for name, seconds in after.items() if name in before}
        return [_control("positive", before, same_sets, timed[test].noise_class)]

    # --- storing

    def to_json(self) -> dict[str, Any]:
        """Return this run's part of the JSON."""
        return {"copied": None, "against": self.sides_json()}

    def sides_json(self) -> dict[str, Any]:
        """Return what the sides are, what was found of each metric, and the confirmation's samples."""
        return {
            "base": _side_json(self.sides.base) | {"torch": self._torch.get(BASE)},
            "candidate": _side_json(self.sides.candidate)
            | {"torch": self._torch.get(CANDIDATE), "spec": dict(self.sides.spec_fields)},
            "settings": asdict(self._settings),
            "rows": [asdict(row) for row in self.rows],
            "confirmation": self._confirmed,
        }


def _of_side(seconds: Mapping[str, float], side: str) -> dict[str, float]:
    """Return the values of one side's process sets; their names begin with the side's."""
    return {name: value for name, value in seconds.items() if name.startswith(side)}


def _control(
    control: Control, base: Mapping[str, float], candidate: Mapping[str, float], noise_class: Hashable
) -> MetricEstimates:
    """Return a control's estimates. base, candidate: seconds by process set."""
    return MetricEstimates(
        test=f"{control} control",
        metric="time",
        base=tuple(base.values()),
        candidate=tuple(candidate.values()),
        noise_class=noise_class,
        control=control,
    )


def _side_json(side: Side) -> dict[str, Any]:
    root = side.root and str(side.root)
    return {"python": side.python, "root": root, "environment": dict(side.environment)}
