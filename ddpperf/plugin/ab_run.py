"""A/B runs, which measure base and candidate alternately and compare them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from math import log1p
from statistics import mean
from types import MappingProxyType
from typing import Any

from ddpperf.errors import first_line
from ddpperf.plugin.control_measurements import CANNOT_MEASURE, SLOW_DOWN, copy_spec, shortest, slowed
from ddpperf.plugin.measure_fixture import Measuring
from ddpperf.plugin.options.sides import Sides
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.secret_values import shown_value
from ddpperf.verdict.ab import Decision, ab_answer
from ddpperf.verdict.estimates import Control, MetricEstimates, estimates_of
from ddpperf.verdict.exit_status import Answer
from ddpperf.verdict.settings import DecisionSettings
from ddpperf.verdict.stored_run_comparison import Comparison


class ABRun:
    """Compares base and candidate, and measures suspected regressions and undecided tests again.

    The first measurement uses a few process sets per side. Later measurements use new process sets.
    A run that compares with a stored run makes an ABRun, too, if it can run the stored run's code.

    comparison: always None, because an A/B run is not compared with a stored run.
    rounds: number of rounds of each test on each process set.
    sides: the interpreters, code and options of base and candidate.
    same_work: for each test, the test that is measured in its place because its work is equal. Each
    test is measured by itself by default.
    tolerances: for some tests, the change of their time that counts as unchanged, as a fraction.
    suspected: tests that are slower than in a stored run.
    decision: the findings; None before the first measurement was compared.
    problems: what this A/B run could not do.
    """

    comparison: Comparison | None = None

    def __init__(
        self,
        sides: Sides,
        settings: DecisionSettings,
        device: str,
        *,
        rounds: int,
        replicates: int | None = None,
        same_work: Mapping[str, str] = MappingProxyType({}),
        tolerances: Mapping[str, float] = MappingProxyType({}),
        suspected: Collection[str] = (),
    ) -> None:
        settings = settings.with_sets(replicates) if replicates is not None else settings
        self.sides = sides
        self.rounds = rounds
        self.decision: Decision | None = None
        self.problems: list[str] = []
        self._same_work = same_work
        self._tolerances = tolerances
        self._suspected = suspected
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
        estimates += self._controls(measuring, estimates) if controls else []
        specs = measuring.measured().values()
        if self.sides.spec_fields and not any(measured.candidate_spec for measured in specs):
            fields = ", ".join(f"{name}={value}" for name, value in self.sides.spec_fields.items())
            self.problems.append(f"--against-spec {fields} changes no test of this run")
        self.decision = Decision(estimates, self._settings, self._suspected)
        return self.decision.open_tests()

    def look(self, measuring: Measuring) -> list[str]:
        """Decide tests by their measurement in new processes, and return those that are still open."""
        assert self.decision is not None
        for test, measure in measuring.measures.items():
            if measure.record.measured is not None:
                self._looks.setdefault(test, []).append(measure.record.to_json())
        self.decision.look(self._estimates(measuring))
        return self.decision.open_tests()

    def end(self) -> None:
        """Stop measuring: suspected regressions that no look could measure become missing."""
        if self.decision is not None:
            self.decision.end()

    def answer(self, cannot: Sequence[str] = ()) -> Answer:
        """Return the result of comparing base and candidate.

        cannot: ids of the tests that the base can measure and the candidate cannot.
        """
        if self.decision is None:
            return ab_answer((), {}, problems=["base and candidate were not compared: no test measured both"])
        return ab_answer(
            self.decision.rows,
            self.decision.missing,
            problems=self.problems,
            unmeasured=cannot,
        )

    def _estimates(self, measuring: Measuring) -> list[MetricEstimates]:
        estimates = []
        for test, measured in measuring.measured().items():
            self._torch |= {sample.side: sample.torch for sample in measured.samples}
            estimates += estimates_of(test, measured, measuring.measures[test].metrics, self._device)
            for other, in_its_place in self._same_work.items():
                if in_its_place == test != other:
                    estimates += estimates_of(other, measured, {}, self._device)
        return [
            replace(entry, tolerance=log1p(self._tolerances[entry.test]))
            if entry.metric == "time" and entry.test in self._tolerances
            else entry
            for entry in estimates
        ]

    # --- controls

    def _controls(self, measuring: Measuring, estimates: list[MetricEstimates]) -> list[MetricEstimates]:
        """Return the control measurements; one that fails becomes a problem of the run."""
        found = []
        for control in (self._copy, self._slow_down):
            try:
                found += control(measuring, estimates)
            except CANNOT_MEASURE as error:
                self.problems.append(f"a control could not be measured: {first_line(error)}")
        return found

    def _copy(self, measuring: Measuring, _: object) -> list[MetricEstimates]:
        """Time a copy of memory in base and candidate, which should take the same time in both."""
        seconds = measuring.pool.measure(copy_spec(self._device)).median_step_seconds()
        return [_control("negative", _of_side(seconds, BASE), _of_side(seconds, CANDIDATE), "copy")]

    def _slow_down(self, measuring: Measuring, estimates: list[MetricEstimates]) -> list[MetricEstimates]:
        """Time the candidate's shortest training step with a delay, which the comparison has to find.

        The base is measured without a delay in the same rounds, so that a change of the machine's
        speed since the step's own measurement cancels out.
        """
        tests = measuring.measured()
        timed = {
            metric.test: metric
            for metric in estimates
            if metric.test in tests and metric.primary and metric.gated and metric.metric == "time"
        }
        test = shortest({test: mean(metric.base) for test, metric in timed.items()}, tests)
        if test is None:
            return []
        measured = tests[test]
        before = measured.median_step_seconds()
        delay = SLOW_DOWN[self._device] * mean(_of_side(before, CANDIDATE).values())
        delayed = measuring.pool.measure(measured.spec, slowed(measured.spec_of(CANDIDATE), delay))
        after = delayed.median_step_seconds()
        if before.keys() != after.keys():  # a process set was replaced in between
            before = measuring.pool.measure(measured.spec, measured.candidate_spec).median_step_seconds()
        scale = mean(_of_side(before, BASE).values())  # makes the ratios seconds again, for the table
        usual, slower = (
            [
                candidate / base
                for base, candidate in zip(
                    _of_side(seconds, BASE).values(), _of_side(seconds, CANDIDATE).values(), strict=True
                )
            ]
            for seconds in (before, after)
        )
        # Both ratios are of the same process sets, so what makes sets differ cancels out, too.
        grown = {
            str(pair): scale * now / then for pair, (then, now) in enumerate(zip(usual, slower, strict=True))
        }
        return [_control("positive", dict.fromkeys(grown, scale), grown, timed[test].noise_class)]

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
