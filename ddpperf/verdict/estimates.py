"""The estimates of metrics: one from each process set of an A/B measurement, or one from each run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median, stdev
from typing import Any

import numpy as np

from ddpperf.results import metrics as registry
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.specs import EpochSpec, Spec
from ddpperf.verdict.noise_classes import NoiseClass, class_of, limits_of, usual_spread
from ddpperf.verdict.settings import Limits, Settings

IDLE = NoiseClass(kind="idle", described="between rounds")
LEAST_IDLE_CPUS = 0.05  # a process set that keeps fewer cores busy between its rounds disturbs nobody
# So many timed steps of a run show the stalls that decide its mean, or steps of so many seconds. A stall of
# 30 ms that makes the mean 5% longer occurs about three times in two seconds.
STALL_STEPS, STALL_SECONDS = 300, 2.0
COUNTED = ("peak_memory_bytes", "cpu_seconds")  # by the ranks


class Stage(StrEnum):
    """The stages of a comparison, in their order."""

    STORED = "stored run"  # this run against the stored run; each side is a single run
    FIRST = "first"  # the first A/B measurement
    REPEAT = "repeat"


class Control(StrEnum):
    """The control measurements, by a phrase for what they measure."""

    COPY = "copy of memory"
    HOST_COPY = "copy in the CPU's cache"
    STORED_COPY = "copy of memory against the stored run"
    DELAYED = "delayed step"
    BASE_ALONE = "base alone"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The specs that base and candidate measure. Tests with equal pairs share one measurement."""

    base: Spec
    candidate: Spec


@dataclass(frozen=True, kw_only=True)
class RowKey:
    """What a row is about: a metric of a pair or, without a pair, of the whole run.

    `test` is empty, except for a metric that only this test can compute, such as a speedup.
    """

    metric: str
    pair: Pair | None = None
    test: str = ""
    control: Control | None = None


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
            found = f"{self.key.metric} of {base} base and {candidate} candidate process sets"
            return f"has {found}; both need at least {least}"
        values = self.base + self.candidate
        exact = registry.find(self.key.metric).exact
        valid = all(0 <= value < math.inf for value in values) and (exact or all(values))
        return "" if valid else f"has a {self.key.metric} that is no positive number"


def pair_of(measured: Measured) -> Pair:
    return Pair(base=measured.spec, candidate=measured.candidate_spec or measured.spec)


def tests_by_pair(measured: Mapping[str, Measured]) -> dict[Pair, list[str]]:
    """Return the tests that measured each pair, in their order."""
    tests: dict[Pair, list[str]] = {}
    for test, one in measured.items():
        tests.setdefault(pair_of(one), []).append(test)
    return tests


# --- of base and candidate


def ab_estimates(
    measured: Mapping[str, Measured],
    metrics: Mapping[str, Mapping[str, Mapping[str, Any]]],
    settings: Settings,
    stage: Stage,
) -> list[Estimates]:
    """Return the estimates of all metrics that can get worse, from an A/B measurement of some tests.

    `metrics` has the stored metrics of each test by name.
    """
    found = []
    sides = {test: {sample.side for sample in one.samples} for test, one in measured.items()}
    both = {test: one for test, one in measured.items() if sides[test] == {BASE, CANDIDATE}}
    for pair, tests in tests_by_pair(both).items():
        one = both[tests[0]]
        noise_class = class_of(one.of(BASE), settings.device)
        timed = {RowKey(metric=name, pair=pair): (tests, by_set) for name, by_set in _timed(one).items()}
        for key, (of_tests, by_set) in {**_of_tests(pair, tests, metrics), **timed}.items():
            base, candidate = (_of_side(one, by_set, side) for side in (BASE, CANDIDATE))
            steps = min(_steps(one.of(side)) for side in (BASE, CANDIDATE))
            made = _estimates(key, of_tests, stage, (base, candidate), noise_class, settings)
            found.append(replace(made, steps=steps))
    return found + _idle(both.values(), settings, stage)


def _of_tests(
    pair: Pair, tests: Sequence[str], metrics: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> dict[RowKey, tuple[list[str], Mapping[str, float]]]:
    """Return the metrics that tests computed, each with its tests and its values by process set.

    An exact metric, such as bytes, is the same in all tests of a pair. Others, such as a speedup, depend
    on the references of the test.
    """
    found: dict[RowKey, tuple[list[str], Mapping[str, float]]] = {}
    for test in tests:
        for name, metric in metrics.get(test, {}).items():
            definition = registry.find_or_plain(name)
            if definition.better is not None and name not in COUNTED:
                key = RowKey(metric=name, pair=pair, test="" if definition.exact else test)
                found.setdefault(key, ([], metric["by_set"]))[0].append(test)
    return found


def _timed(measured: Measured) -> dict[str, Mapping[str, float]]:
    """Return the metrics of the measurement itself, by name and process set."""
    values: dict[str, Mapping[str, float]] = {"time": measured.median_step_seconds()}
    if all(len(sample.seconds) > 1 for sample in measured.samples):
        values["mean_time"] = measured.mean_step_seconds()
        values["tail_seconds"] = {
            sample.set: float(np.quantile(measured.step_seconds(sample), 0.9)) for sample in measured.samples
        }
    for counter in COUNTED:
        if by_set := measured.counter(counter):
            values[counter] = by_set
    return values


def _of_side(measured: Measured, by_set: Mapping[str, float], side: str) -> tuple[float, ...]:
    return tuple(by_set[s.set] for s in measured.samples if s.side == side and s.set in by_set)


def _steps(measured: Measured) -> int:
    steps = measured.spec.steps_per_epoch if isinstance(measured.spec, EpochSpec) else 1
    rounds = sum(len(sample.seconds) for sample in measured.samples)
    return rounds * measured.iterations * measured.spec.calls * steps


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
    base, candidate = (
        tuple(value for (of_side, _), value in cores.items() if of_side == side) for side in (BASE, CANDIDATE)
    )
    if min(len(base), len(candidate)) < 2:
        return []
    return [_estimates(RowKey(metric="idle_cpus"), (), stage, (base, candidate), IDLE, settings)]


def _estimates(
    key: RowKey,
    tests: Sequence[str],
    stage: Stage,
    sides: tuple[tuple[float, ...], tuple[float, ...]],
    noise_class: NoiseClass,
    settings: Settings,
) -> Estimates:
    """Return the estimates of a metric. sides: the values of base and candidate."""
    return Estimates(
        key=key,
        tests=tuple(tests),
        stage=stage,
        base=sides[0],
        candidate=sides[1],
        noise_class=noise_class,
        limits=limits_of(key.metric, noise_class, settings),
    )


# --- of a stored run and this run


def with_equal_specs(then: Mapping[str, Measured], now: Mapping[str, Measured]) -> dict[str, Measured]:
    """Return what this run measured in the tests that both runs measured with equal specs."""
    return {test: one for test, one in now.items() if test in then and then[test].spec == one.spec}


def stored_estimates(
    then: Mapping[str, Measured], now: Mapping[str, Measured], settings: Settings
) -> list[Estimates]:
    """Return the estimates of what two runs measured with equal specs: the stored run is the base.

    The mean decides only from `STALL_STEPS` timed steps or `STALL_SECONDS` on, because a rare stall has to
    occur in both runs before it can be compared.
    """
    found = []
    for pair, tests in tests_by_pair(with_equal_specs(then, now)).items():
        runs = then[tests[0]], now[tests[0]]
        noise_class = class_of(runs[0], settings.device)
        steps = min(map(_steps, runs))
        by_run = [_timed(run) for run in runs]
        for metric in ("time", "mean_time", "peak_memory_bytes"):
            if not all(metric in values for values in by_run):
                continue
            error = math.hypot(*map(_round_error, runs)) if metric == "mean_time" else 0.0
            then_value, now_value = (median(values[metric].values()) for values in by_run)
            key, values = RowKey(metric=metric, pair=pair), ((then_value,), (now_value,))
            made = _estimates(key, tests, Stage.STORED, values, noise_class, settings)
            usual = usual_spread(metric, pair.base, settings)
            error = error if not error or all(map(_shows_stalls, runs)) else math.inf
            found.append(replace(made, steps=steps, run_spread=usual, round_error=error))
    return found


def stored_exact(
    measured: Mapping[str, Measured],
    then: Mapping[str, Mapping[str, Mapping[str, Any]]],
    now: Mapping[str, Mapping[str, Mapping[str, Any]]],
    settings: Settings,
) -> list[Estimates]:
    """Return the estimates of the exact metrics, such as bytes, of a stored run and this run.

    `measured` has the tests that both runs measured with equal specs, and `then` and `now` have the stored
    metrics of each test by name.
    """
    found = []
    for pair, tests in tests_by_pair(measured).items():
        before, after = (_of_tests(pair, tests, metrics) for metrics in (then, now))
        for key in (key for key in before if key in after and registry.find_or_plain(key.metric).exact):
            base, candidate = (max(by_set.values()) for _, by_set in (before[key], after[key]))
            noise_class = class_of(measured[tests[0]], settings.device)
            values = ((base,), (candidate,))
            found.append(_estimates(key, after[key][0], Stage.STORED, values, noise_class, settings))
    return found


def stored_missing(
    then: Mapping[str, Measured], now: Mapping[str, Measured], expected: Iterable[str], name: str
) -> dict[str, str]:
    """Return why expected tests of the stored run `name` cannot be compared with this run."""
    found = {}
    for test in sorted(set(expected) & then.keys()):
        runs = {name: then[test], "this run": now.get(test, then[test])}
        resumed = [which for which, run in runs.items() if any(run.counter("resumed_epochs").values())]
        if test not in now:
            found[test] = f"is in {name} but was not measured"
        elif now[test].spec != then[test].spec:
            found[test] = f"measures another spec than in {name}"
        elif resumed:
            what = f"resumed from a checkpoint in {resumed[0]}"
            found[test] = f"{what}, so its time is not that of the whole training"
    return found


def _shows_stalls(run: Measured) -> bool:
    return _steps(run) >= STALL_STEPS or run.counted_seconds() >= STALL_SECONDS


def _round_error(run: Measured) -> float:
    """Return the standard error of a run's mean step time as a fraction, from its rounds."""
    rounds = run.all_step_seconds()
    return stdev(rounds) / (sum(rounds) / len(rounds)) / math.sqrt(len(rounds)) if len(rounds) > 1 else 0.0
