"""The settings that decide whether a difference counts as a change, such as margins.

Each hardware class and each metric may have its own numbers. These come from [decision] in
perf/thresholds.toml, with built-in defaults. A misspelt name, a value out of range, or values that
contradict each other raise ValueError.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from ddpperf.errors import quoted
from ddpperf.results import metrics
from ddpperf.verdict.two_stage_test import CPU, GPU, MOST_SETS, Settings

NAME = "perf/thresholds.toml"
_DEFAULTS = {"gpu": GPU, "cpu": CPU}

# How much the step times of runs of nearly the same code differ, over pairs of stored runs: the
# root mean square of the differences, and the largest one. A pair is quiet if both runs have quiet
# rounds.
# 5 runs in perf/baselines on 2 H200 machines:
#   quiet pairs 0.14% on one machine, 0.59% between the two, 0.46% in all (578 pairs, at most 2.2%)
#   other pairs 14% (132 pairs, at most 137%)
# These and 10 earlier runs from git on 6 more machines:
#   quiet pairs 0.25% on one machine, 0.77% between machines, 0.91% between two days (1311 pairs, at
#   most 6.0%)
# These runs replayed CUDA graphs at two paces. At one pace, the standard deviation of a single run is,
# for quiet tests in a CUDA graph:
#   training steps: 0.17% on one machine (31 specs); between two machines 0.16% to 0.35% (five pairs of
#   runs with 14 to 34 specs)
#   collective calls: 0.32% on one machine (19 specs); between two machines 0.39% to 0.81% (three pairs
#   with 19 to 65 specs); half of the calls differ by less than 0.3%, and one by 3.7%
# 8 runs in perf/baselines on 2 cores of an EPYC, by the spread of the rounds:
#   below 5%: 3.1% (86 pairs, at most 12%); 5 to 10%: 5.9% (37 pairs, at most 15%); above 10%: 12%
#   (at most 167% in 22 runs of one day)
# Of collective calls on 2 cores, two runs differ by 30%, so one run by 20%.
# A whole training takes 6.31 to 6.50 s in 5 runs on two H200 machines, 1.2%.
# A default that is too high costs little, because a test's own runs correct it. A default that is
# too low costs false alarms on another day.
_SPREADS: dict[str, dict[str, Any]] = {
    "gpu": {"quiet_iqr": 0.02, "run_spread": 0.0035, "noisy_run_spread": 0.2, "call_spread": 0.02},
    "cpu": {"quiet_iqr": 0.1, "run_spread": 0.06, "noisy_run_spread": 0.2, "call_spread": 0.2},
}
_METRIC_DEFAULTS = {  # by class and metric, where they differ from the class's defaults
    "gpu": {
        "tail_seconds": {"margin": 0.02, "tolerance": 0.10},
        "cpu_seconds": {"margin": 0.05, "tolerance": 0.25},
        "peak_memory_bytes": {"margin": 0.005, "tolerance": 0.02},
    },
    "cpu": {
        "tail_seconds": {"margin": 0.10, "tolerance": 0.50},
        "peak_memory_bytes": {"margin": 0.005, "tolerance": 0.02},
    },
}
# A comparison with a stored run has to show slow-downs of this fraction, if the step is captured in
# a CUDA graph or runs on the CPU. It has less time than an A/B run, so it takes fewer process sets.
# Simulated on a CPU with 40 tests whose process sets differ by 4.5%: with 3 process sets in each later
# measurement, 97% of unchanged suites pass, and 51% with 2 process sets. The 3 cost less time, on
# average 96 instead of 132 process sets times tests, because fewer tests are measured again.
_BETWEEN_RUNS = {
    "gpu": {"tolerance": 0.03, "screen_sets": 3, "confirm_sets": 3},
    "cpu": {"tolerance": 0.25, "screen_sets": 2, "confirm_sets": 3},
}
MOST_KNOWN_LETTERS = 150  # of the known words in a sentence
_SET_KEYS = ("screen_sets", "confirm_sets")
_SETTING_KEYS = tuple(field.name for field in dataclasses.fields(Settings))
_SPREAD_KEYS = tuple(_SPREADS["gpu"])
_METRIC_KEYS = ("margin", "tolerance")  # the other values hold for all metrics


@dataclass(frozen=True, kw_only=True)
class DecisionSettings:
    """The settings that decide comparisons of measurements on one hardware class, gpu or cpu.

    `metrics` holds the metrics with numbers of their own. `run_spread` is the usual standard
    deviation of the log of a step time between runs of the same code, for tests whose rounds have
    an interquartile range below `quiet_iqr` of their median. `call_spread` is the same for
    collective calls and whole trainings, and `noisy_run_spread` for all other measurements. Quiet
    collective calls in a CUDA graph are suspected by `run_spread`, and called slower by
    `call_spread`. A comparison with a stored run has to show a slow-down by the fraction
    `tolerance_between_runs`. `confirms` says whether an A/B run measures what such a comparison
    left open. It then decides clear worsenings by its first measurement, and can detect worsenings
    above the 95% interval. Any other A/B run detects worsenings that it finds 19 times in 20.
    """

    default: Settings
    metrics: Mapping[str, Settings]
    quiet_iqr: float
    run_spread: float
    noisy_run_spread: float
    call_spread: float
    tolerance_between_runs: float
    confirms: bool = False

    def __post_init__(self) -> None:
        own, most = self.run_spread, self.noisy_run_spread
        if not 0 < own <= most:
            raise ValueError(f"run_spread {own} must lie above 0, up to noisy_run_spread {most}")

    def of(self, metric: str) -> Settings:
        """Return the settings for a metric: its own settings if there are any, else the defaults."""
        return self.metrics.get(metric, self.default)

    def beside_stored_code(self, device: str) -> DecisionSettings:
        """Return the settings of an A/B run that confirms a comparison with a stored run."""
        fewer = _BETWEEN_RUNS["gpu" if device == "cuda" else "cpu"]
        sets = {key: int(fewer[key]) for key in _SET_KEYS}
        # Settings with a wide margin keep their own tolerance, which lies above the margin.
        between = math.log1p(self.tolerance_between_runs)
        tolerance = between if between > self.default.margin else self.default.tolerance
        return dataclasses.replace(
            self,
            confirms=True,
            default=dataclasses.replace(self.default, tolerance=tolerance, **sets),
            metrics={name: dataclasses.replace(own, **sets) for name, own in self.metrics.items()},
        )

    def with_sets(self, screen_sets: int) -> DecisionSettings:
        """Return a copy of the settings with another number of process sets for the screening.

        The second measurement takes at least as many process sets.
        """

        def changed(settings: Settings) -> Settings:
            confirm_sets = max(screen_sets, settings.confirm_sets)
            return dataclasses.replace(settings, screen_sets=screen_sets, confirm_sets=confirm_sets)

        by_metric = {metric: changed(settings) for metric, settings in self.metrics.items()}
        return dataclasses.replace(self, default=changed(self.default), metrics=by_metric)


Changed = TypeVar("Changed", Settings, DecisionSettings)


def read_decision(document: Mapping[str, Any]) -> dict[str, DecisionSettings]:
    """Return the decision settings for gpu and cpu from the [decision] tables of a TOML document.

    Built-in values fill the gaps. The values of a metric, even built-in ones, override the values
    of its hardware class. Raises ValueError with one sentence for the first wrong value.
    """
    classes = _table(document, "decision", "class", tuple(_DEFAULTS))
    return {hardware: _class_settings(classes, hardware) for hardware in _DEFAULTS}


def _class_settings(classes: Mapping[str, Any], hardware: str) -> DecisionSettings:
    header = f"decision.{hardware}"
    values = _table(classes, header, "key", (*_SETTING_KEYS, *_SPREAD_KEYS, "metrics"))
    decided = [metric.name for metric in metrics.registered() if metric.better and not metric.exact]
    by_metric = _table(values, f"{header}.metrics", "metric", decided)
    default = _changed(_DEFAULTS[hardware], values, header)
    built_in = _METRIC_DEFAULTS[hardware]
    own = {}
    for metric in dict.fromkeys([*built_in, *by_metric]):
        metric_header = f"{header}.metrics.{metric}"
        given = _table(by_metric, metric_header, "key", _METRIC_KEYS)
        own[metric] = _changed(default, {**built_in.get(metric, {}), **given}, metric_header)
    between_runs = _BETWEEN_RUNS[hardware]["tolerance"]
    settings = DecisionSettings(
        default=default, metrics=own, tolerance_between_runs=between_runs, **_SPREADS[hardware]
    )
    return _changed(settings, values, header)


def _table(parent: Mapping[str, Any], header: str, what: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the TOML table with this header, empty if absent; raise ValueError for unknown keys."""
    table = parent.get(header.rpartition(".")[2], {})
    if not isinstance(table, dict):
        raise ValueError(
            f"{NAME} has {header} = {quoted(table)}; write a table, which begins with [{header}]"
        )
    for key in table:
        if key not in known:
            raise ValueError(
                f"[{header}] of {NAME} has the unknown {what} {quoted(key)}; {advice(key, known)}"
            )
    return table


def _changed(settings: Changed, table: Mapping[str, Any], header: str) -> Changed:
    """Return the settings with a table's values; raise ValueError for wrong or contradicting values."""
    place = f"[{header}] of {NAME}"
    values = {key: value for key, value in table.items() if key != "metrics" and hasattr(settings, key)}
    for key, value in values.items():
        number = type(value) in (int, float)
        if key in _SET_KEYS:
            valid = type(value) is int and 2 <= value <= MOST_SETS
            wanted = f"a whole number from 2 to {MOST_SETS}"
        elif key in _METRIC_KEYS:
            valid, wanted = number and 0 <= value < 1, "a fraction from 0 to below 1, such as 0.02"
        elif key in _SPREAD_KEYS:
            valid, wanted = number and 0 < value < 1, "a fraction above 0 and below 1, such as 0.02"
        else:
            valid, wanted = number and 0 < value < 0.5, "a probability above 0 and below 0.5, such as 0.02"
        if not valid:
            raise ValueError(f"{place} has {key} = {quoted(value)}; write {wanted}")
    try:
        return dataclasses.replace(settings, **values)
    except ValueError as error:
        raise ValueError(
            f"{place} contradicts itself, together with the defaults for what it leaves out ({error}); "
            "change one of the two values"
        ) from error


def advice(word: str, known: Sequence[str]) -> str:
    """Return advice for a misspelt word: the nearest known word, or the first known words."""
    nearest = get_close_matches(word, known, n=1)
    some = textwrap.shorten(", ".join(known), MOST_KNOWN_LETTERS, placeholder=" ...")
    return f"write {nearest[0]}" if nearest else f"use {some}"
