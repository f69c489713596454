"""The estimates of metrics: one from each process set of an A/B measurement, or one from each run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import mean, median, stdev
from typing import Any

from ddpperf.results import metrics as registry
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.specs import EpochSpec, Spec
from ddpperf.verdict.noise_classes import NoiseClass, class_of, limits_of, usual_spread
from ddpperf.verdict.settings import Limits, Settings

IDLE = NoiseClass(kind="idle")
LEAST_IDLE_CPUS = 0.05  # a process set that keeps fewer cores busy between its rounds disturbs nobody
# So many timed steps of a run show the stalls that decide its mean, or steps of so many seconds. A stall of
# 30 ms that makes the mean 5% longer occurs about three times in two seconds.
STALL_STEPS, STALL_SECONDS = 300, 2.0
SideValues = Sequence[Sequence[float]]  # the values of base and candidate, one for each process set
MetricsOfTests = Mapping[str, Mapping[str, Mapping[str, Any]]]  # as stored, by test and name


class Stage(StrEnum):
    STORED = "stored run"  # this run against the stored run; each side is a single run
    FIRST = "first"  # the first A/B measurement
    REPEAT = "repeat"


class Control(StrEnum):
    """The control measurements, by a phrase for what they measure."""

    COPY = "copy of memory"
    HOST_COPY = "copy in the CPU's cache"
    STORED_COPY = "copy of memory against the stored run"
    DELAYED = "delayed step"
    BASE_ALONE = "base beside the candidate"


# For information only:
TAILS = tuple(f"{of}_{end}_seconds" for of in ("call", "step") for end in ("p50", "p99", "largest"))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The specs that base and candidate measure. Tests with equal pairs share one measurement."""

    base: Spec
    candidate: Spec


@dataclass(frozen=True, kw_only=True)
class RowKey:
    """What a row is about: a metric of a pair or, without a pair, of the whole run."""

    metric: str
    pair: Pair | None = None
    control: Control | None = None

    @property
    def exact(self) -> bool:
        """Whether any difference of this metric is a change."""
        return registry.find(self.metric).exact


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The estimates of one metric in one stage: a value for each process set of base and candidate.

    In the stage `STORED`, each side has the value of one run. `run_spread` is then the usual standard
    deviation of the log values between runs of the same code, and `round_error` the standard error of
    the log ratio that follows from the rounds. `limits` is None for a metric that is for information
    only. `steps` is the number of timed steps per side.
    """

    key: RowKey
    tests: tuple[str, ...]
    stage: Stage
    base: tuple[float, ...]
    candidate: tuple[float, ...]
    noise_class: NoiseClass
    limits: Limits | None = None
    steps: int = 0
    run_spread: float = 0.0
    round_error: float = 0.0

    @property
    def missing(self) -> str:
        """The reason why this metric cannot be judged, or an empty string if it can be judged."""
        least = 1 if self.stage is Stage.STORED else 2
        base, candidate = len(self.base), len(self.candidate)
        if min(base, candidate) < least:
            found = f"{base} base and {candidate} candidate process sets"
            return f"has a {self.key.metric} of {found}; both need at least {least}"
        values = self.base + self.candidate
        valid = all(0 <= value < math.inf for value in values) and (self.key.exact or all(values))
        return "" if valid else f"has a {self.key.metric} that is no positive number"


def tests_by_pair(measured: Mapping[str, Measured]) -> dict[Pair, list[str]]:
    """Return the tests that measured each pair, in their order."""
    tests: dict[Pair, list[str]] = {}
    for test, one in measured.items():
        pair = Pair(base=one.spec, candidate=one.spec_of(CANDIDATE))
        tests.setdefault(pair, []).append(test)
    return tests


def ab_estimates(
    measured: Mapping[str, Measured], metrics: MetricsOfTests, settings: Settings, stage: Stage
) -> list[Estimates]:
    """Return the estimates of all metrics that can fail a run, from an A/B measurement of some tests."""
    found = []
    both = {test: one for test, one in measured.items() if {s.side for s in one.samples} == {BASE, CANDIDATE}}
    for pair, tests in tests_by_pair(both).items():
        one = both[tests[0]]
        base, candidate = one.of(BASE), one.of(CANDIDATE)
        noise_class, steps = class_of(base, settings.device), min(_steps(base), _steps(candidate))
        for key, (of_tests, by_set) in _values(pair, tests, one, metrics).items():
            sides = [
                [by_set[sample.set] for sample in side.samples if sample.set in by_set]
                for side in (base, candidate)
            ]
            found.append(estimates_of(key, of_tests, stage, sides, noise_class, settings, steps=steps))
    return found + _idle(both.values(), settings, stage)


def stored_estimates(
    then: Mapping[str, Measured],
    now: Mapping[str, Measured],
    settings: Settings,
    then_metrics: MetricsOfTests,
    now_metrics: MetricsOfTests,
) -> list[Estimates]:
    """Return the estimates of what two runs measured with equal specs: the stored run is the base."""
    found = []
    equal = {test: one for test, one in now.items() if test in then and then[test].spec == one.spec}
    for pair, tests in tests_by_pair(equal).items():
        runs = then[tests[0]], now[tests[0]]
        noise_class, steps = class_of(runs[0], settings.device), min(map(_steps, runs))
        before = _values(pair, tests, runs[0], then_metrics)
        after = _values(pair, tests, runs[1], now_metrics)
        for key, (of_tests, _) in (before | after).items():
            if not key.exact and not (key in before and key in after):
                continue
            # A run does not store the bytes of what it did not send
            values = [of_run[key][1].values() if key in of_run else [0.0] for of_run in (before, after)]
            sides = [[max(of_run) if key.exact else median(of_run)] for of_run in values]
            entry = estimates_of(key, of_tests, Stage.STORED, sides, noise_class, settings, steps=steps)
            error = math.hypot(*map(_round_error, runs)) if key.metric == "mean_time" else 0.0
            spread = usual_spread(key.metric, pair.base, settings)
            found.append(replace(entry, run_spread=spread, round_error=error))
    return found


def stored_missing(
    then: Mapping[str, Measured], now: Mapping[str, Measured], expected: Iterable[str], name: str
) -> dict[str, str]:
    """Return why expected tests of the stored run `name` cannot be compared with this run."""
    found = {}
    for test in sorted(set(expected) & then.keys()):
        if test not in now:
            found[test] = f"is in {name} but was not measured"
        elif now[test].spec != then[test].spec:
            found[test] = f"measures another spec than in {name}"
    return found


def _values(
    pair: Pair, tests: Sequence[str], measured: Measured, metrics: MetricsOfTests
) -> dict[RowKey, tuple[Sequence[str], Mapping[str, float]]]:
    """Return the metrics of a pair that can fail a run, each with its tests and its values by process set.

    Of the metrics that tests compute, these are the exact ones, such as bytes. They are the same in all
    tests of a pair.
    """
    found: dict[RowKey, tuple[list[str], Mapping[str, float]]] = {}
    for test in tests:
        for name, metric in metrics.get(test, {}).items():
            definition = registry.find_or_plain(name)
            if definition.gate and definition.exact:
                key = RowKey(metric=name, pair=pair)
                found.setdefault(key, ([], metric["by_set"]))[0].append(test)
    timed = _timed(measured)
    return found | {RowKey(metric=name, pair=pair): (tests, timed[name]) for name in timed}


def _timed(measured: Measured) -> dict[str, Mapping[str, float]]:
    """Return the metrics of the measurement itself, by name and process set."""
    if not measured.spec.repeats:  # a round is an epoch; the mean over few epochs shows a slow one
        values: dict[str, Mapping[str, float]] = {"time": measured.mean_step_seconds()}
    else:
        values = {"time": measured.median_step_seconds(), "mean_time": measured.mean_step_seconds()}
    if by_set := measured.counter("peak_memory_bytes"):
        values["peak_memory_bytes"] = by_set
    return values | {name: by_set for name in TAILS if (by_set := measured.counter(name))}


def _steps(measured: Measured) -> int:
    """Return the number of timed steps, of all devices together if they took turns."""
    turns = max(1, len(measured.samples[0].seconds[0]) // measured.spec.world_size)
    steps = measured.spec.steps_per_epoch if isinstance(measured.spec, EpochSpec) else 1
    rounds = sum(len(sample.seconds) for sample in measured.samples)
    return rounds * measured.iterations * measured.spec.calls * steps * turns


def _idle(measured: Iterable[Measured], settings: Settings, stage: Stage) -> list[Estimates]:
    """Return how many CPU cores each process set kept busy between its rounds, over all measurements."""
    cpu: dict[tuple[str, str], float] = {}
    wall: dict[tuple[str, str], float] = {}
    for sample in {id(sample): sample for one in measured for sample in one.samples}.values():
        if "idle_cpu_seconds" in sample.counters:
            place = sample.side, sample.set
            cpu[place] = cpu.get(place, 0.0) + sum(sample.counters["idle_cpu_seconds"])
            wall[place] = wall.get(place, 0.0) + max(sample.counters["idle_seconds"])
    cores = {place: max(LEAST_IDLE_CPUS, cpu[place] / wall[place]) for place in cpu if wall[place] > 0}
    sides = [[value for place, value in cores.items() if place[0] == side] for side in (BASE, CANDIDATE)]
    if min(map(len, sides)) < 2:
        return []
    return [estimates_of(RowKey(metric="idle_cpus"), (), stage, sides, IDLE, settings)]


def estimates_of(
    key: RowKey,
    tests: Sequence[str],
    stage: Stage,
    sides: SideValues,
    noise_class: NoiseClass,
    settings: Settings,
    steps: int = 0,
) -> Estimates:
    """Return the estimates of a metric. sides: the values of base and candidate."""
    return Estimates(
        key=key,
        tests=tuple(tests),
        stage=stage,
        base=tuple(sides[0]),
        candidate=tuple(sides[1]),
        noise_class=noise_class,
        limits=limits_of(key.metric, noise_class, settings),
        steps=steps,
    )


def _round_error(run: Measured) -> float:
    """Return the standard error of a run's mean step time as a fraction, from its rounds.

    It is infinite below `STALL_STEPS` and `STALL_SECONDS`, because a rare stall has to occur in a run
    before it can be compared.
    """
    if _steps(run) < STALL_STEPS and run.counted_seconds() < STALL_SECONDS:
        return math.inf
    rounds = run.all_step_seconds()
    return stdev(rounds) / mean(rounds) / math.sqrt(len(rounds)) if len(rounds) > 1 else 0.0
