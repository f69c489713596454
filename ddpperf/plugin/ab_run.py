"""A/B runs, which measure base and candidate alternately and compare them."""

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
    """Compares base and candidate, and measures each suspected regression a second time.

    The first measurement uses a few process sets per side. The second one uses more process sets,
    whose processes are new. A run that compares with a stored run makes an ABRun, too, if it can
    run
    the stored run's code. That ABRun only measures suspected regressions.

    baseline, comparison: always None, because an A/B run is not compared with a stored run.
    sides: the interpreters, code and options of base and candidate.
    replicates: number of process sets per side; None for the number in `settings`.
    """

    baseline: Baseline | None = None
    comparison: Comparison | None = None

    def __init__(
        self, sides: Sides, settings: DecisionSettings, device: str, *, replicates: int | None = None
    ) -> None:
        self.sides = sides
        self._device = device
        self._settings = settings.with_sets(replicates) if replicates is not None else settings
        self._decision: Decision | None = None
        self._confirmed: dict[str, Any] = {}  # by test id, the stored second measurement
        self._sets_option = "--replicates"
        self._torch: dict[str, str] = {}  # the version of torch, by side
        self._problems: list[str] = []

    @property
    def replicates(self) -> int:
        """Number of process sets per side in the first measurement of each test."""
        return self._settings.default.screen_sets

    @property
    def confirmation_replicates(self) -> int:
        """Number of process sets per side in the second measurement of a suspected regression."""
        return self._settings.default.confirm_sets

    @property
    def confirmation(self) -> ABRun:
        """The A/B run that measures suspected regressions again, which is this A/B run itself."""
        return self

    @property
    def decided(self) -> bool:
        return self._decision is not None

    def judge(self, measuring: Measuring, expected: Collection[str]) -> list[str]:
        """Compare base and candidate of every test, and return the ids of tests that look slower.

        The control measurements are made before.
        expected: not used, because base and candidate measure the same tests.
        """
        del expected
        estimates = self._estimates(measuring)
        estimates += self._controls(measuring, estimates)
        specs = measuring.measured().values()
        if self.sides.spec_fields and not any(measured.candidate_spec for measured in specs):
            fields = ", ".join(f"{name}={value}" for name, value in self.sides.spec_fields.items())
            self._problems.append(f"--against-spec {fields} changes no test of this run")
        self._decision = Decision(estimates, self._settings)
        return self._decision.suspects()

    def confirm(self, measuring: Measuring) -> None:
        """Decide which suspected regressions are real, from their second measurement."""
        assert self._decision is not None
        self._decision.confirm(self._estimates(measuring))
        self._keep(measuring)

    def confirm_suspects(self, measuring: Measuring, suspects: Sequence[str]) -> None:
        """Compare base and candidate of the tests that look slower than in a stored run."""
        estimates = self._estimates(measuring)
        estimates += self._controls(measuring, estimates)
        self._decision = Decision(estimates, self._settings, suspects_only=True)
        self._sets_option = "in perf/thresholds.toml confirm_sets ="
        judged = {row.test for row in self._decision.rows if row.primary and row.gated}
        for test in suspects:
            if test not in judged:
                self._decision.missing.setdefault(
                    test, "looks slower, but has no metric to compare between base and candidate"
                )
        self._keep(measuring)

    def answer(
        self, measured: Mapping[str, Measured], expected: Collection[str], cannot: Sequence[str]
    ) -> Answer:
        """Return the result of comparing base and candidate.

        cannot: ids of the tests that the base can measure and the candidate cannot.
        """
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
        """The result of comparing base and candidate for each metric of each test."""
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
        """Return the results of both control measurements.

        A control measurement that fails is added to the problems of the run.
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
        """Time a copy of memory in base and candidate, which should take the same time in both."""
        copied = pool.measure(copy_spec(self._device)).median_step_seconds()
        base, candidate = (_of_side(copied, side) for side in (BASE, CANDIDATE))
        return [_control("negative", base, candidate, "copy")]

    def _slow_down(self, measuring: Measuring, estimates: list[MetricEstimates]) -> list[MetricEstimates]:
        """Time the candidate's shortest training step with and without an artificial delay.

        The comparison has to find the delay. Both times are the candidate's, so that only the delay
        differs.
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
        """Return the fields that an A/B run adds to the stored JSON file."""
        return {"copied": None, "against": self.sides_json()}

    def sides_json(self) -> dict[str, Any]:
        """Return JSON that describes base, candidate and the results of their comparison."""
        return {
            "base": _side_json(self.sides.base) | {"torch": self._torch.get(BASE)},
            "candidate": _side_json(self.sides.candidate)
            | {"torch": self._torch.get(CANDIDATE), "spec": dict(self.sides.spec_fields)},
            "settings": asdict(self._settings),
            "rows": [asdict(row) for row in self.rows],
            "confirmation": self._confirmed,
        }


def _of_side(seconds: Mapping[str, float], side: str) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if name.startswith(side)}


def _control(
    control: Control, base: Mapping[str, float], candidate: Mapping[str, float], noise_class: Hashable
) -> MetricEstimates:
    """Convert step times of a control measurement to the input of the A/B comparison.

    base, candidate: seconds by the name of the process set.
    """
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
