"""The `measure` fixture: measures a spec, and stores its samples and metrics with the test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NoReturn

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ddpperf.machine.hardware import Machine
from ddpperf.plugin.options.sides import Sides
from ddpperf.results import metrics
from ddpperf.results.notes import Note, info, warning
from ddpperf.results.outcomes import OutcomeKind
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.results.stored_runs import SCHEMA
from ddpperf.specs import Spec
from ddpperf.workers.failures import Cause, SetFailure
from ddpperf.workers.pool import Pool


class VirtualClock:
    """A timer for pytest-benchmark that only moves by the seconds that ranks measured.

    It starts each round at zero, so that the difference of two readings is the measured float to
    the last bit.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def __repr__(self) -> str:
        return "VirtualClock()"

    def rewind(self) -> None:
        self._now = 0.0

    def advance(self, seconds: float) -> None:
        self._now += seconds


CLOCK = VirtualClock()


class Measure:
    """Measures specs for one test: its own with `measure(spec)`, others that its metrics need with
    `measure.reference`.

    In an A/B run both sides are measured. The test's duration, and the value of each metric, are
    those of the side that runs this environment.

    machine: what is known of this machine. measured: the result of `measure(spec)`, None before.
    metrics: by name, as the JSON has them. stored: everything that the JSON has of the test. notes:
    warnings and explanations. ended_as: BASE_FAILED if ranks of the base failed, CANDIDATE_CANNOT
    if only the candidate cannot measure the test. counted_seconds: spent in rounds that count.
    """

    def __init__(
        self,
        benchmark: BenchmarkFixture,
        pool: Callable[[], Pool],
        notes: Callable[[Measured, bool], list[Note]],
        *,
        machine: Machine | None = None,
        sides: Sides | None = None,
    ) -> None:
        """notes: returns the warnings about a measurement, and takes whether it was made just now."""
        self.machine = machine or Machine()
        self.measured: Measured | None = None
        self.stored: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.counted_seconds = 0.0
        self.ended_as: OutcomeKind | None = None
        self.metrics: dict[str, dict[str, Any]] = {}
        self._benchmark = benchmark
        self._pool = pool
        self._notes = notes
        self._sides = sides
        self._references: dict[str, Any] = {}

    def __call__(self, spec: Spec) -> Measured:
        """Measure the test's own spec, and hand its step seconds to pytest-benchmark.

        The same process sets measure equal specs once, for all tests. Fails the test if a rank
        fails.
        """
        if self.measured is not None:
            _fail(
                "a test measures one spec as its own, this is its second; "
                "yield two cases, or measure a reference"
            )
        self.measured = measured = self._measure(spec, own=True)
        for name, reference in self._references.items():
            self._require_same_sets(name, {sample["set"] for sample in reference["samples"]})
        self._benchmark.extra_info["ddpperf"] = self.stored = {
            "schema": SCHEMA,
            **measured.to_json(),
            "references": self._references,
            "metrics": self.metrics,
            "notes": [note.to_json() for note in self.notes],
        }
        durations = measured.of(self._here).all_step_seconds()
        rounds: Iterator[float] = iter(durations)
        self._benchmark.pedantic(
            lambda: CLOCK.advance(next(rounds, 0.0)), setup=CLOCK.rewind, rounds=len(durations), iterations=1
        )
        return measured

    def reference(self, name: str, spec: Spec) -> Measured:
        """Measure another spec on the same process sets, and store it as a reference with this
        name.
        """
        measured = self._measure(spec, own=False)
        self._require_same_sets(name, {sample.set for sample in measured.samples})
        self._references[name] = measured.to_json()
        return measured

    def attempt(self, spec: Spec) -> Measured | str:
        """Measure what may need too much memory, alone on one process set, and store nothing.

        Returns a sentence if memory ended, or a library raised what may be its limit. The process
        sets are replaced then, so that the test's own spec has to be measured after all attempts.
        """
        try:
            return self._with_notes(lambda pool: pool.measure_alone(spec))
        except SetFailure as failure:
            sentence = str(failure)
            if failure.failures[0].cause is Cause.RAISED and failure.failures[0].limit:
                return sentence.splitlines()[0]
        pytest.fail(sentence, pytrace=False)

    def _require_same_sets(self, reference: str, sets: set[str]) -> None:
        if self.measured is not None and sets != {sample.set for sample in self.measured.samples}:
            _fail(
                f"a process set was replaced between the reference {reference} and the test's own spec; "
                "run it again"
            )

    def metric(self, name: str, by_set: Mapping[str, float]) -> None:
        """Store a registered metric: each process set's value, and the median over those of this
        environment.

        Fails the test if the registry has no metric of this name, or a value is NaN or infinite.
        """
        try:
            unit = metrics.find(name).unit
        except KeyError:
            _fail(
                f"the metric {name} is not registered; add it to ddpperf/results/metrics.py, "
                "or call ddpperf.results.metrics.register in your own suite"
            )
        if not by_set or not all(math.isfinite(value) for value in by_set.values()):
            _fail(f"the metric {name} must have a finite number for each set, got {dict(by_set)}")
        value = median(self._of_side(by_set, self._here) or by_set.values())
        self.metrics[name] = {"value": value, "unit": unit, "by_set": dict(by_set)}

    def _of_side(self, by_set: Mapping[str, float], side: str) -> list[float]:
        """Return the values of one side's process sets; none before the test's own spec was
        measured.
        """
        samples = self.measured.of(side).samples if self.measured is not None else ()
        sets = {sample.set for sample in samples}
        return [value for name, value in by_set.items() if name in sets]

    @property
    def stats(self) -> Any:
        """pytest-benchmark's figures of the test; None until its own spec was measured."""
        return self._benchmark.stats if self.measured is not None else None

    @property
    def _here(self) -> str:
        """The side that runs this environment."""
        return self._sides.here if self._sides is not None else BASE

    @property
    def judged_side(self) -> str:
        """The side that thresholds hold for: in an A/B run the candidate."""
        return BASE if self._sides is None else CANDIDATE

    def values(self) -> dict[str, float]:
        """Return the value of each metric on the judged side."""
        if self._sides is None:
            return {name: metric["value"] for name, metric in self.metrics.items()}
        by_name = {
            name: self._of_side(metric["by_set"], self.judged_side) for name, metric in self.metrics.items()
        }
        return {name: median(values) for name, values in by_name.items() if values}

    def warn(self, text: str) -> None:
        """Add a warning about the test's figures; the test still passes."""
        self._add(warning(text))

    def note(self, text: str) -> None:
        """Add an explanation of the test's figures."""
        self._add(info(text))

    def _add(self, note: Note) -> None:
        if note not in self.notes:
            self.notes.append(note)
            if self.stored:
                self.stored["notes"].append(note.to_json())

    def _measure(self, spec: Spec, *, own: bool) -> Measured:
        """Measure a spec, once on the same process sets.

        own: whether it is the test's own spec, not a reference.
        """
        if not isinstance(spec, Spec):
            _fail(f"measure takes a spec such as AllReduceSpec, got {spec!r}")
        candidate = self._candidate_of(spec, own=own)
        try:
            return self._with_notes(lambda pool: pool.measure_once(spec, candidate))
        except (SetFailure, ValueError, OSError) as error:
            failure = str(error)
            if isinstance(error, SetFailure) and self._sides is not None:
                of_base = error.set_name.startswith(BASE)
                self.ended_as = OutcomeKind.BASE_FAILED if of_base else None
                failure = f"the {'base' if of_base else 'candidate'}'s {failure}"
            elif isinstance(error, OSError) and self._sides is not None:
                self.ended_as = (
                    OutcomeKind.BASE_FAILED
                )  # the machine lacks something, which is not the candidate's fault
        pytest.fail(failure, pytrace=False)  # outside of the handler, or the error would be printed twice

    def _candidate_of(self, spec: Spec, *, own: bool) -> Spec | None:
        """Return the candidate's spec if it is another one.

        Skips the test if only the candidate cannot measure it.
        """
        if self._sides is None:
            return None
        try:
            return self._sides.candidate_of(spec, own=own)
        except ValueError as error:
            self.ended_as = OutcomeKind.CANDIDATE_CANNOT
            pytest.skip(f"the candidate cannot measure it: {error}")

    def _with_notes(self, measured_by: Callable[[Pool], Measured]) -> Measured:
        """Measure, count the seconds of rounds, and add the warnings about the measurement."""
        pool = self._pool()
        before = pool.counted_seconds
        measured = measured_by(pool)
        spent = pool.counted_seconds - before
        self.counted_seconds += spent
        for note in self._notes(measured, spent > 0):
            self._add(note)
        return measured


def _fail(sentence: str) -> NoReturn:
    pytest.fail(sentence, pytrace=False)
