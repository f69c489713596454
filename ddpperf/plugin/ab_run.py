"""A/B runs, which measure base and candidate alternately and compare them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from ddpperf.errors import first_line
from ddpperf.plugin.control_measurements import CANNOT_MEASURE, SLOW_DOWN, copy_spec, shortest, slowed
from ddpperf.plugin.measure_fixture import Measuring
from ddpperf.plugin.options.sides import Sides
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.verdict.ab import Decision, ab_answer
from ddpperf.verdict.estimates import Control, MetricEstimates, estimates_of
from ddpperf.verdict.exit_status import Answer
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.stored_run_comparison import Comparison


class ABRun:
    """Compares base and candidate, and measures each suspected regression a second time.

    The first measurement uses a few process sets per side. The second one uses more process sets,
    whose processes are new. A run that compares with a stored run makes an ABRun, too, if it can
    run the stored run's code. That ABRun only measures suspected regressions.

    comparison: always None, because an A/B run is not compared with a stored run.
    sides: the interpreters, code and options of base and candidate.
    replicates: number of process sets per side in the first measurement of each test.
    confirmation_replicates: number of process sets per side in the second measurement.
    """

    comparison: Comparison | None = None

    def __init__(
        self, sides: Sides, settings: DecisionSettings, device: str, replicates: int | None = None
    ) -> None:
        settings = settings.with_sets(replicates) if replicates is not None else settings
        self.sides = sides
        self.replicates = settings.default.screen_sets
        self.confirmation_replicates = settings.default.confirm_sets
        self._device = device
        self._settings = settings
        self._decision: Decision | None = None
        self._confirmed: dict[str, Any] = {}  # by test id, the stored second measurement
        self._sets_option = "--replicates"
        self._torch: dict[str, str] = {}  # the version of torch, by side
        self._problems: list[str] = []

    @property
    def decided(self) -> bool:
        return self._decision is not None

    def judge(self, measuring: Measuring) -> list[str]:
        """Compare base and candidate of every test, and return the ids of tests that look slower.

        The control measurements are made before.
        """
        estimates = self._estimates(measuring)
        estimates += self._controls(measuring, estimates)
        specs = measuring.measured().values()
        if self.sides.spec_fields and not any(measured.candidate_spec for measured in specs):
            fields = ", ".join(f"{name}={value}" for name, value in self.sides.spec_fields.items())
            self._problems.append(f"--against-spec {fields} changes no test of this run")
        self._decision = Decision(estimates, self._settings)
        return self._decision.suspects()

    def confirm(self, measuring: Measuring, suspects: Sequence[str]) -> None:
        """Decide which suspected regressions are real, from their measurement in new processes.

        Without a first measurement of base and candidate, a comparison with a stored run found the
        suspects.
        """
        estimates = self._estimates(measuring)
        self._confirmed = {
            test: measure.stored for test, measure in measuring.measures.items() if measure.stored
        }
        if self._decision is not None:
            self._decision.confirm(estimates)
            return
        estimates += self._controls(measuring, estimates)
        self._decision = Decision(estimates, self._settings, suspects_only=True)
        self._sets_option = "in perf/thresholds.toml confirm_sets ="
        judged = {row.test for row in self._decision.rows if row.primary and row.gated}
        no_metric = "looks slower, but has no metric to compare between base and candidate"
        for test in suspects:
            if test not in judged:
                self._decision.missing.setdefault(test, no_metric)

    def answer(self, cannot: Sequence[str] = ()) -> Answer:
        """Return the result of comparing base and candidate.

        cannot: ids of the tests that the base can measure and the candidate cannot.
        """
        if self._decision is None:
            return ab_answer((), {}, problems=["base and candidate were not compared: no test measured both"])
        return ab_answer(
            self._decision.rows,
            self._decision.missing,
            problems=self._problems,
            unmeasured=cannot,
            sets_option=self._sets_option,
        )

    def _estimates(self, measuring: Measuring) -> list[MetricEstimates]:
        estimates = []
        for test, measured in measuring.measured().items():
            self._torch |= {sample.side: sample.torch for sample in measured.samples}
            estimates += estimates_of(test, measured, measuring.measures[test].metrics, self._device)
        return estimates

    # --- controls

    def _controls(self, measuring: Measuring, estimates: list[MetricEstimates]) -> list[MetricEstimates]:
        """Return the control measurements; one that fails becomes a problem of the run."""
        found = []
        for control in (self._copy, self._slow_down):
            try:
                found += control(measuring, estimates)
            except CANNOT_MEASURE as error:
                self._problems.append(f"a control could not be measured: {first_line(error)}")
        return found

    def _copy(self, measuring: Measuring, _: object) -> list[MetricEstimates]:
        """Time a copy of memory in base and candidate, which should take the same time in both."""
        seconds = measuring.pool.measure(copy_spec(self._device)).median_step_seconds()
        return [_control("negative", _of_side(seconds, BASE), _of_side(seconds, CANDIDATE), "copy")]

    def _slow_down(self, measuring: Measuring, estimates: list[MetricEstimates]) -> list[MetricEstimates]:
        """Time the shortest training step with a delay, which the comparison has to find."""
        timed = {
            metric.test: metric
            for metric in estimates
            if metric.primary and metric.gated and metric.metric == "time"
        }
        tests = measuring.measured()
        test = shortest({test: mean(metric.base) for test, metric in timed.items()}, tests)
        if test is None:
            return []
        measured = tests[test]
        # Both times are the candidate's, so that only the delay differs.
        before = _of_side(measured.median_step_seconds(), CANDIDATE)
        delay = SLOW_DOWN[self._device] * mean(before.values())
        delayed = measuring.pool.measure(measured.spec, slowed(measured.spec_of(CANDIDATE), delay))
        after = _of_side(delayed.median_step_seconds(), CANDIDATE)
        same_sets = {name: seconds for name, seconds in after.items() if name in before}
        return [_control("positive", before, same_sets, timed[test].noise_class)]

    # --- storing

    def to_json(self) -> dict[str, Any]:
        """Return the fields that an A/B run adds to the stored JSON file."""
        return {"copied": None, "against": self.sides_json()}

    def sides_json(self) -> dict[str, Any]:
        """Return JSON that describes base, candidate and the results of their comparison."""
        base, candidate = (
            {
                "python": side.python,
                "root": side.root and str(side.root),
                "environment": dict(side.environment),
                "torch": self._torch.get(side.name),
            }
            for side in (self.sides.base, self.sides.candidate)
        )
        return {
            "base": base,
            "candidate": candidate | {"spec": dict(self.sides.spec_fields)},
            "settings": asdict(self._settings),
            "rows": [asdict(row) for row in self._decision.rows] if self._decision is not None else [],
            "confirmation": self._confirmed,
        }


def _of_side(seconds: Mapping[str, float], side: str) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if name.startswith(side)}


def _control(
    control: Control, base: Mapping[str, float], candidate: Mapping[str, float], noise_class: Hashable
) -> MetricEstimates:
    return MetricEstimates(
        test=f"{control} control",
        metric="time",
        base=tuple(base.values()),
        candidate=tuple(candidate.values()),
        noise_class=noise_class,
        control=control,
    )
