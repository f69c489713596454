"""The `measure` fixture, which measures a spec and stores its samples and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ddpperf.errors import Refused
from ddpperf.instruments.kernels import other_kernels
from ddpperf.io.terminal_text import harmless
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.device_guard import Devices
from ddpperf.plugin.options.ab_sides import Sides
from ddpperf.results import metrics
from ddpperf.results.outcomes import Note, info, warning
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.specs import CustomStepSpec, Spec, TrainingSpec
from ddpperf.specs.labels import training_labels
from ddpperf.workers.failures import Cause, SetFailure
from ddpperf.workers.pool import Pool


def clock_of(seconds: Sequence[float]) -> Callable[[], float]:
    """Return a timer for pytest-benchmark that shows the seconds that the ranks measured.

    It is read at the start and at the end of each round. A round starts at zero, so that the difference
    of the two times is exactly the measured float.
    """
    shown = chain.from_iterable((0.0, of_round) for of_round in seconds)

    def virtual_clock() -> float:  # pytest-benchmark stores this name
        return next(shown)

    return virtual_clock


@dataclass
class Measuring:
    """The measurements of all tests in the same worker processes.

    sides: base and candidate of an A/B run; None if only this environment is measured.
    order: the test ids in the order of the test files.
    whole: tests that are measured to their end, although only times are measured again.
    model: the user's own model, or "". A strategy that cannot train it is skipped, except in tests that
    a stored run or an earlier pass has measured.
    known: these tests.
    """

    pool: Pool
    devices: Devices
    machine: Machine
    sides: Sides | None = None
    order: Sequence[str] = ()
    whole: Collection[str] = ()
    model: str = ""
    known: Collection[str] = ()

    def __post_init__(self) -> None:
        # By what is trained: from which batch size on it is refused, and why
        self.refused: dict[tuple[str, ...], tuple[int, str]] = {}
        self.measures: dict[str, Measure] = {}  # by test id
        self._notes: dict[tuple[Spec, tuple[str, ...]], list[Note]] = {}

    @property
    def side(self) -> str:
        """The stored name of the side whose times and metrics a test shows."""
        return BASE if self.sides is None else CANDIDATE

    def measured(self) -> dict[str, Measured]:
        found = ((test, self.measures[test].measured) for test in self.order if test in self.measures)
        return {test: measured for test, measured in found if measured is not None}

    def notes(self, measured: Measured, fresh: bool) -> list[Note]:
        """Return the warnings about a measurement.

        fresh: whether the measurement was made just now. Warnings about the devices are then stored
        for the other tests that share the measurement.
        """
        key = measured.spec, tuple(sample.set for sample in measured.samples)
        if fresh:
            self._notes[key] = self.devices.warnings(measured.spec)
        found = [*other_kernels(measured), *silent_ranks(measured)]
        return [*self._notes.get(key, []), *map(warning, found)]


class Measure:
    """Measures the work that a test's spec describes, and keeps what is stored of the test.

    Call `measure(spec)` for the test's own spec, and `measure.reference(name, spec)` for the other
    specs. In an A/B run, base and candidate are measured. The test's duration, and the value of
    each metric, are then the candidate's.

    measured: the measurement of the test's own spec; None before that measurement.
    references: the measurements of other specs that metrics need, by name.
    metrics: the metrics by name, as they are stored as JSON.
    notes: warnings and explanations.
    counted_seconds: the time spent in timed rounds.
    base_failed: whether the test failed because of the base, or of this machine.
    """

    def __init__(
        self,
        benchmark: BenchmarkFixture,
        measuring: Measuring,
        mark: Callable[[str], object] = lambda marker: None,
        test: str = "",
    ) -> None:
        self.measured: Measured | None = None
        self.references: dict[str, Measured] = {}
        self.metrics: dict[str, dict[str, Any]] = {}
        self.notes: list[Note] = []
        self.counted_seconds = 0.0
        self.base_failed = False
        self._benchmark = benchmark
        self._mark = mark  # adds a marker to the test
        self._measuring = measuring
        self._test = test

    @property
    def machine(self) -> Machine:
        """The properties of this machine, such as the bandwidth of its links."""
        return self._measuring.machine

    def __call__(self, spec: Spec) -> Measured:
        """Measure the step time of the test's own spec, and pass it to pytest-benchmark.

        Equal specs of several tests are measured once. The test fails if a rank fails.
        """
        if self.measured is not None:
            why = "a test measures one spec as its own, this is its second"
            _fail(f"{why}; yield two cases, or measure a reference")
        measured = self._measure(spec, own=True)
        for name, reference in self.references.items():
            _require_same_sets(name, reference, measured)
        self.measured = measured
        durations = measured.of(self._measuring.side).all_step_seconds()
        self._benchmark._timer = clock_of(durations)
        self._benchmark.pedantic(lambda: None, rounds=len(durations), iterations=1)
        return measured

    def reference(self, name: str, spec: Spec) -> Measured:
        """Measure another spec that a metric needs, such as a single-device step, and store it by name.

        In a measurement that needs only the time of the test's own spec, the test ends at the first
        reference after its own spec.
        """
        own, ends_early = self.measured, self._test not in self._measuring.whole
        if own is not None and self._measuring.pool.options.time_only and ends_early:
            pytest.skip("this measurement needs only the time of the test's own spec")
        measured = self._measure(spec, own=False)
        if own is not None:
            _require_same_sets(name, measured, own)
        self.references[name] = measured
        return measured

    def attempt(self, spec: Spec) -> Measured | str:
        """Measure a spec that may need too much memory, without storing the result.

        The spec is measured on a single process set. Returns a sentence if memory ran out, or if a
        library reached one of its limits. The worker processes are then replaced, so the test's own
        spec has to be measured after all attempts.
        """
        try:
            return self._with_notes(lambda: self._measuring.pool.measure_alone(spec))
        except SetFailure as failure:
            sentence = str(failure)
            if failure.failures[0].cause is Cause.RAISED and failure.failures[0].limit:
                return sentence.splitlines()[0]
        pytest.fail(harmless(sentence), pytrace=False)

    def metric(self, name: str, by_set: Mapping[str, float]) -> None:
        """Store a registered metric of the test, with one value for each process set.

        The stored value is the median over the process sets, in an A/B run over the candidate's; before
        the test's own spec was measured, over all. The test fails if the metric is not registered, or
        if a value is NaN or infinite.
        """
        if not (unit := metrics.find_or_plain(name).unit):
            _fail(f"the metric {name} is not registered; register it with ddpperf.results.metrics.register")
        if not by_set or not all(math.isfinite(value) for value in by_set.values()):
            _fail(f"the metric {name} must have a finite number for each set, got {dict(by_set)}")
        value = median(self._of_side(by_set, self._measuring.side) or by_set.values())
        self.metrics[name] = {"value": value, "unit": unit, "by_set": dict(by_set)}

    def values_of(self, side: str) -> dict[str, float]:
        """Return the values of the metrics of the base or of the candidate."""
        by_name = {name: self._of_side(metric["by_set"], side) for name, metric in self.metrics.items()}
        return {name: median(values) for name, values in by_name.items() if values}

    def _of_side(self, by_set: Mapping[str, float], side: str) -> list[float]:
        samples = self.measured.samples if self.measured is not None else ()
        sets = {sample.set for sample in samples if sample.side == side}
        return [value for name, value in by_set.items() if name in sets]

    def warn(self, text: str) -> None:
        """Add a warning about the test's measurement; the test still passes."""
        self._add(warning(text))

    def note(self, text: str) -> None:
        """Add an explanation of the test's measurement to the report."""
        self._add(info(text))

    def _add(self, note: Note) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def to_json(self) -> dict[str, Any]:
        assert self.measured is not None
        return {
            **self.measured.to_json(),
            "references": {name: reference.to_json() for name, reference in self.references.items()},
            "metrics": self.metrics,
            "notes": [asdict(note) for note in self.notes],
        }

    def stats(self) -> Any:
        """Return pytest-benchmark's statistics with what is stored of the test."""
        self._benchmark.extra_info["ddpperf"] = self.to_json()
        return self._benchmark.stats

    def _measure(self, spec: Spec, *, own: bool) -> Measured:
        """Measure a spec, or return the result if the same worker processes measured it before."""
        if not isinstance(spec, Spec):
            _fail(f"measure takes a spec such as AllReduceSpec, got {spec!r}")
        sides, measured = self._measuring.sides, self.measured
        try:
            candidate = sides.candidate_of(spec, own=own) if sides is not None else None
        except ValueError as error:
            self._mark("candidate_cannot")
            pytest.skip(f"the candidate cannot measure it: {error}")
        # The references of a test are measured by the process sets that measured the test's own spec.
        ranks = measured.spec.world_size if measured is not None else 0
        of_base, trained = False, self._trained(spec)
        batch = spec.per_rank_batch_size if isinstance(spec, TrainingSpec) else 0
        refused = self._measuring.refused
        try:
            if trained not in refused or batch < refused[trained][0]:
                return self._with_notes(lambda: self._measuring.pool.measure_once(spec, candidate, ranks))
            self._skip(refused[trained][1])
        except SetFailure as error:
            if trained and error.sides == {side.name for side in self._measuring.pool.sides}:
                model, how, *setup = trained
                what = f"{model} cannot be trained by {how} ({', '.join(setup)}): {error.reason}"
                # A smaller batch may fit into the memory
                refused[trained] = batch * error.failures[0].limit, harmless(what)
                self._skip(refused[trained][1])
            if sides is not None and error.sides == {CANDIDATE} and sides.have_equal_code(Path.cwd()):
                self._mark("candidate_cannot")
                pytest.skip(f"the candidate cannot measure it: {harmless(error.reason)}")
            failure, of_base = str(error), error.set_name.startswith(BASE)
            if sides is not None:
                failure = f"the {'base' if of_base else 'candidate'}'s {failure}"
            of_base = of_base or error.is_slow_start  # which a busy machine is, too
        except (ValueError, OSError, Refused) as error:
            failure = str(error)
            # The machine lacks something, such as a temporary folder, which is not the candidate's fault.
            of_base = not isinstance(error, ValueError)
        if sides is not None and of_base:
            self.base_failed = True
            self._mark("base_failed")
        pytest.fail(harmless(failure), pytrace=False)  # in the handler, the error would be printed twice

    def _skip(self, why: str) -> NoReturn:
        self.measured = None  # although this may be a reference: a skipped test has no result
        pytest.skip(why)

    def _trained(self, spec: Spec) -> tuple[str, ...]:
        """Return the user's model, and how it is trained; or () if the model is not what may be refused."""
        measuring = self._measuring
        known = self._test in measuring.known
        if known or not isinstance(spec, TrainingSpec) or spec.model != measuring.model:
            return ()
        return spec.model, training_labels(spec)["strategy"], spec.precision, spec.execution

    def _with_notes(self, measure: Callable[[], Measured]) -> Measured:
        before = self._measuring.pool.counted_seconds
        measured = measure()
        spent = self._measuring.pool.counted_seconds - before
        self.counted_seconds += spent
        for note in self._measuring.notes(measured, spent > 0):
            self._add(note)
        return measured


def _require_same_sets(name: str, reference: Measured, own: Measured) -> None:
    sets, own_sets = ({sample.set for sample in measured.samples} for measured in (reference, own))
    if sets != own_sets:
        between = f"the reference {name} and the test's own spec"
        _fail(f"a process set was replaced between {between}; run it again")


def _fail(sentence: str) -> NoReturn:
    pytest.fail(harmless(sentence), pytrace=False)


def silent_ranks(measured: Measured) -> list[str]:
    """Return a warning if a custom step on several ranks called no collective."""
    if not isinstance(measured.spec, CustomStepSpec) or not (found := measured.counter("collectives")):
        return []
    advice = "wrap the model in DistributedDataParallel, or average the gradients"
    return [] if all(found.values()) else [f"the ranks send each other nothing in a step: {advice}"]
