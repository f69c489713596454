"""The `measure` fixture: a spec goes to the pool, its rounds go to pytest-benchmark, its raw samples into the JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ddpperf.machine.hardware import Machine
from ddpperf.plugin.options.sides import Sides
from ddpperf.results import metrics
from ddpperf.results.notes import Note, info, warning
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.results.stored_runs import SCHEMA
from ddpperf.specs import Spec
from ddpperf.workers.failures import Cause, SetFailure
from ddpperf.workers.pool import Pool


class VirtualClock:
    """A timer for pytest-benchmark that stands still but for the seconds that ranks measured.

    It starts each round at zero, so that the difference of its two readings is the measured float to the last bit.
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
    """Measures specs for one test. `measure(spec)` is the test's own result, `measure.leg` another one that it needs.

    A run with two sides measures both, by set. The test's one duration, and the value of each metric, are of the side that is
    this very environment.

    machine: what is known of it. measured: what `measure(spec)` gave, None before. metrics: by name, as the JSON holds them.
    stored: all that it holds of the test. stats: pytest-benchmark's. notes: warnings and explanations.
    base_failed: whether it was the base's ranks that failed. candidate_cannot: whether only the candidate cannot measure the
    test, which is then skipped. counted_seconds: spent in rounds that count, of what
    was not measured before.
    """

    def __init__(
        self,
        benchmark: BenchmarkFixture,
        pool: Callable[[], Pool],
        warnings: Callable[[Measured, bool], list[Note]],
        *,
        machine: Machine | None = None,
        sides: Sides | None = None,
    ) -> None:
        self.machine = machine or Machine()
        self.measured: Measured | None = None
        self.stored: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.counted_seconds = 0.0
        self.base_failed = False
        self.candidate_cannot = False
        self.metrics: dict[str, dict[str, Any]] = {}
        self.stats: Any = None
        self._benchmark = benchmark
        self._pool = pool
        self._warnings = warnings
        self._sides = sides
        self._here = sides.here if sides is not None else BASE
        self._references: dict[str, Any] = {}

    def __call__(self, spec: Spec) -> Measured:
        """Measure `spec` and give pytest-benchmark the seconds of a step in each round; fails the test if a rank fails.

        A spec is measured once by the same sets, for all tests that have it as their own or as a leg.
        """
        if self.measured is not None:
            pytest.fail(
                "a test measures one spec as its own, this is its second; make it a cell, or a leg",
                pytrace=False,
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
        self.stats = self._benchmark.stats
        return measured

    def reference(self, name: str, spec: Spec) -> Measured:
        """Measure `spec` on the same sets, or take what they measured of it before, and keep it in the JSON as `name`."""
        measured = self._measure(spec, own=False)
        self._require_same_sets(name, {sample.set for sample in measured.samples})
        self._references[name] = measured.to_json()
        return measured

    def attempt(self, spec: Spec) -> Measured | str:
        """Measure what may be too much for a device, on a set that has it for itself, and keep nothing of it: a sentence where
        memory ended, or a library raised what may be its limit. Sets are then replaced: the test's own spec is to be measured
        after all attempts."""
        try:
            return self._told(lambda pool: pool.measure_alone(spec))
        except SetFailure as failure:
            sentence = str(failure)
            if failure.failures[0].cause is Cause.RAISED and failure.failures[0].limit:
                return sentence.splitlines()[0]
        pytest.fail(sentence, pytrace=False)

    def _require_same_sets(self, reference: str, sets: set[str]) -> None:
        if self.measured is not None and sets != {sample.set for sample in self.measured.samples}:
            pytest.fail(
                f"a process set was replaced between the leg {reference} and the test's own spec; run it again",
                pytrace=False,
            )

    def metric(self, name: str, by_set: Mapping[str, float]) -> None:
        """Store a registered metric: each set's value, and the median over the sets of this environment's side.

        Fails the test if the registry has no metric of this name, or a value is NaN or infinite.
        """
        try:
            unit = metrics.find(name).unit
        except KeyError:
            pytest.fail(
                f"the metric {name} is not registered; add it to ddpperf/results/metrics.py, "
                "or call ddpperf.results.metrics.register in your own suite",
                pytrace=False,
            )
        if not by_set or not all(math.isfinite(value) for value in by_set.values()):
            pytest.fail(
                f"the metric {name} must have a finite number for each set, got {dict(by_set)}", pytrace=False
            )
        here = (
            {sample.set for sample in self.measured.of(self._here).samples}
            if self.measured is not None
            else set()
        )
        values = [value for each, value in by_set.items() if each in here] or list(by_set.values())
        self.metrics[name] = {"value": median(values), "unit": unit, "by_set": dict(by_set)}

    @property
    def judged(self) -> str:
        """The side that thresholds hold for: of two the candidate, which is what may be worse."""
        return BASE if self._sides is None else CANDIDATE

    def values(self) -> dict[str, float]:
        """The metrics by name, as thresholds hold them."""
        if self._sides is None or self.measured is None:
            return {name: metric["value"] for name, metric in self.metrics.items()}
        sets = {sample.set for sample in self.measured.of(self.judged).samples}
        by_name = {
            name: [value for each, value in metric["by_set"].items() if each in sets]
            for name, metric in self.metrics.items()
        }
        return {name: median(values) for name, values in by_name.items() if values}

    def warn(self, reason: str) -> None:
        """Add a warning about the test's figures; the test still passes."""
        self._add(warning(reason))

    def note(self, text: str) -> None:
        """Add an explanation of the test's figures."""
        self._add(info(text))

    def _add(self, note: Note) -> None:
        if note not in self.notes:
            self.notes.append(note)
            if self.stored:
                self.stored["notes"].append(note.to_json())

    def _candidate_of(self, spec: Spec, *, own: bool) -> Spec | None:
        """Skips the test where the candidate cannot measure a leg of it; of a test's own spec that was seen before."""
        if self._sides is None:
            return None
        try:
            return self._sides.candidate_of(spec, own=own)
        except ValueError as error:
            self.candidate_cannot = True
            pytest.skip(f"the candidate cannot measure it: {error}")

    def _measure(self, spec: Spec, *, own: bool) -> Measured:
        if not isinstance(spec, Spec):
            pytest.fail(f"measure takes a spec such as AllReduceSpec, got {spec!r}", pytrace=False)
        try:
            return self._take(spec, own=own)
        except (SetFailure, ValueError, OSError) as error:
            failure = str(error)
            if isinstance(error, SetFailure) and self._sides is not None:
                self.base_failed = error.set_name.startswith(BASE)
                failure = f"the {'base' if self.base_failed else 'candidate'}'s {failure}"
            elif isinstance(error, OSError) and self._sides is not None:
                self.base_failed = True  # this machine's want of something is no side's fault
        pytest.fail(failure, pytrace=False)  # outside of the handler, or the error would be printed twice

    def _take(self, spec: Spec, *, own: bool) -> Measured:
        """From the pool, which measures the same only once."""
        candidate = self._candidate_of(spec, own=own)
        return self._told(lambda pool: pool.measure_once(spec, candidate))

    def _told(self, measured_by: Callable[[Pool], Measured]) -> Measured:
        """What the pool measured, with the seconds that it counts and the doubts about it."""
        pool = self._pool()
        before = pool.counted_seconds
        measured = measured_by(pool)
        spent = pool.counted_seconds - before
        self.counted_seconds += spent
        for note in self._warnings(measured, spent > 0):
            self._add(note)
        return measured
