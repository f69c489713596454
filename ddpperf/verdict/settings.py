"""What decides for a class of hardware and a metric: the [decision] of perf/thresholds.toml, or the built-in values.

What could not decide is refused, as in thresholds.py: a misspelt name, a value out of range, two that contradict each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from ddpperf.verdict.two_stage_test import CPU, GPU, MOST_SETS, Settings

HIGHER_IS_BETTER = (
    "speedup",
    "efficiency",
    "images_per_second",
    "algbw_bytes_per_second",
    "busbw_bytes_per_second",
    "gradient_busbw_bytes_per_second",
    "test_accuracy",
)
LOWER_IS_BETTER = (
    "time",
    "tail_seconds",
    "step_seconds",
    "epoch_seconds",
    "cpu_seconds",
    "peak_memory_bytes",
    "exposed_comm_seconds",
)
METRICS_DECIDED = (*LOWER_IS_BETTER, *HIGHER_IS_BETTER)

_DEFAULTS = {"gpu": GPU, "cpu": CPU}

# Measured between runs of nearly the same code: root mean square over pairs of runs, test by test, and the largest difference.
# H200s, 5 runs in perf/baselines, on 2 machines. Where the rounds of both runs are quiet: 0.14 % on a machine, 0.59 %
# between the two, 0.46 % in all (578 pairs, at most 2.2 %); else 14 % (132 pairs, at most 137 %). With 10 earlier ones that git
# still has, on 6 more machines: quiet 0.25 % on a machine, 0.77 % between, 0.91 % between two days (1311 pairs, at most 6.0 %).
# 2 cores of an EPYC, 8 of the runs in perf/baselines: steps whose rounds spread by less than 5 % have 3.1 % (86 pairs, at most
# 12 %), by 5 to 10 % 5.9 % (37 pairs, at most 15 %), and all that spread by more 12 % (at most 167 % in 22 runs of a day).
# A value above what was seen costs little, for a test's own runs correct it. One below it costs false alarms on another day.
_SPREADS = {
    "gpu": {"quiet_iqr": 0.01, "run_spread": 0.01, "noisy_run_spread": 0.2},
    "cpu": {"quiet_iqr": 0.1, "run_spread": 0.06, "noisy_run_spread": 0.2},
}
_OWN = {  # by class and metric, what differs from the class' default
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
_SETS = ("screen_sets", "confirm_sets")
_KEYS = tuple(field.name for field in dataclasses.fields(Settings))
_SPREAD_KEYS = ("quiet_iqr", "run_spread", "noisy_run_spread")
_METRIC_KEYS = (
    "margin",
    "tolerance",
)  # the sets are measured once for all metrics, and the alphas are the suite's


@dataclass(frozen=True, kw_only=True)
class DecisionSettings:
    """The values of one class of hardware. metrics: by name, those that have their own.

    run_spread, noisy_run_spread: the usual standard deviation, of the natural log of a time, between runs of the same code; of
    tests whose rounds spread by less than `quiet_iqr`, as a fraction of their median, and of all others.
    """

    default: Settings
    metrics: Mapping[str, Settings]
    quiet_iqr: float
    run_spread: float
    noisy_run_spread: float

    def __post_init__(self) -> None:
        if not 0 < self.run_spread <= self.noisy_run_spread:
            raise ValueError(
                f"run_spread {self.run_spread} must lie above 0, up to noisy_run_spread {self.noisy_run_spread}"
            )

    def of(self, metric: str) -> Settings:
        """The metric's own values, else the default."""
        return self.metrics.get(metric, self.default)

    def with_sets(self, screen_sets: int) -> DecisionSettings:
        """The same with this number of process sets a side in the first look, and at least as many in the second."""

        def changed(settings: Settings) -> Settings:
            confirm_sets = max(screen_sets, settings.confirm_sets)
            return dataclasses.replace(settings, screen_sets=screen_sets, confirm_sets=confirm_sets)

        metrics = {metric: changed(own) for metric, own in self.metrics.items()}
        return dataclasses.replace(self, default=changed(self.default), metrics=metrics)


Changed = TypeVar("Changed", Settings, DecisionSettings)


def read_decision(document: Mapping[str, Any], *, name: str) -> dict[str, DecisionSettings]:
    """By class, gpu and cpu, what `document` gives, and where it gives nothing the built-in values.

    A metric's own values, built-in ones too, go before those of its class. Raises ValueError with one sentence for the first
    that is wrong. name: the file's.
    """
    classes = _table(document, "decision", "class", tuple(_DEFAULTS), name)
    return {hardware: _class(classes, hardware, name) for hardware in _DEFAULTS}


def _class(classes: Mapping[str, Any], hardware: str, name: str) -> DecisionSettings:
    header = f"decision.{hardware}"
    values = _table(classes, header, "key", (*_KEYS, *_SPREAD_KEYS, "metrics"), name)
    metrics = _table(values, f"{header}.metrics", "metric", METRICS_DECIDED, name)
    place = f"[{header}] of {name}"
    default = _changed(_DEFAULTS[hardware], {key: values[key] for key in _KEYS if key in values}, place)
    built_in, own = _OWN[hardware], {}
    for metric in [*built_in, *(metric for metric in metrics if metric not in built_in)]:
        given = _table(metrics, f"{header}.metrics.{metric}", "key", _METRIC_KEYS, name)
        own[metric] = _changed(
            default, {**built_in.get(metric, {}), **given}, f"[{header}.metrics.{metric}] of {name}"
        )
    decided = DecisionSettings(default=default, metrics=own, **_SPREADS[hardware])
    return _changed(decided, {key: values[key] for key in _SPREAD_KEYS if key in values}, place)


def _table(
    parent: Mapping[str, Any], header: str, what: str, known: Sequence[str], name: str
) -> Mapping[str, Any]:
    """The table of that header, empty if left out; raises ValueError for anything else there, and for keys not `known`."""
    table = parent.get(header.rpartition(".")[2], {})
    if not isinstance(table, dict):
        raise ValueError(f"{name} has {header} = {table!r}; write a table, which begins with [{header}]")
    for key in table:
        if key not in known:
            raise ValueError(f"[{header}] of {name} has the unknown {what} {key!r}; {advice(key, known)}")
    return table


def _changed(settings: Changed, values: Mapping[str, Any], place: str) -> Changed:
    """`settings` with these values, checked one by one and together."""
    for key, value in values.items():
        number = type(value) in (int, float)
        if key in _SETS:
            fits, wanted = (
                type(value) is int and 2 <= value <= MOST_SETS,
                f"a whole number from 2 to {MOST_SETS}",
            )
        elif key in _METRIC_KEYS:
            fits, wanted = number and 0 <= value < 1, "a fraction from 0 to below 1, such as 0.02"
        elif key in _SPREAD_KEYS:
            fits, wanted = number and 0 < value < 1, "a fraction above 0 and below 1, such as 0.02"
        else:
            fits, wanted = number and 0 < value < 0.5, "a probability above 0 and below 0.5, such as 0.02"
        if not fits:
            raise ValueError(f"{place} has {key} = {value!r}; write {wanted}")
    try:
        return dataclasses.replace(settings, **values)
    except ValueError as error:
        raise ValueError(
            f"{place}, with what it leaves out, contradicts itself ({error}); change one of the two"
        ) from error


def advice(word: str, known: Sequence[str]) -> str:
    """What to write instead of `word`: the known one that is nearest, or any of them."""
    nearest = get_close_matches(word, known, n=1)
    return f"write {nearest[0]}" if nearest else f"use {', '.join(known)}"
