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
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from ddpperf.errors import quoted
from ddpperf.results import metrics as registry

NAME = "perf/thresholds.toml"
MOST_SETS = 64  # the most process sets of each of base and candidate in one run
MOST_KNOWN_LETTERS = 150  # of the known words in a sentence
_SET_KEYS = ("first_sets", "repeat_sets")
_SPREAD_KEYS = ("run_spread", "noisy_run_spread", "call_spread")
_OLD_KEYS = {
    "screen_sets": "write first_sets",
    "confirm_sets": "write repeat_sets",
    "suite_alpha": "write false_alarms",
    "screen_alpha": "the level of the first measurement is fixed; delete it",
    "quiet_iqr": "the usual spread no longer depends on the rounds; delete it",
    "tail_seconds": "the slowest tenth of the rounds no longer decides; write mean_time",
    "cpu_seconds": "CPU seconds no longer decide; delete the table",
    "speedup": "a speedup no longer decides; delete the table",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits for the change of one metric, as fractions: 0.02 is a slow-down of 2%.

    A slow-down up to `margin` does not matter. A slow-down of `tolerance` must be found or excluded.
    """

    margin: float
    tolerance: float

    def __post_init__(self) -> None:
        if not 0 <= self.margin < self.tolerance:
            raise ValueError(f"margin {self.margin} must be at least 0 and below tolerance {self.tolerance}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that decide comparisons on one hardware class.

    `margin` and `tolerance` are the limits of times on the CPU, and of steps and calls in a CUDA
    graph on GPUs. `compare_tolerance` is the tolerance of a comparison with a stored run, which has
    less time. `metrics` has the limits of other metrics. `first_sets` and `repeat_sets` are the process
    sets of each side in the first A/B measurement and in each repeat. `false_alarms` is the largest
    probability that a run fails although nothing got worse by more than its margin. The usual standard
    deviation of the log of a time between two runs of the same code is `run_spread` on the CPU and in
    CUDA graphs, `call_spread` for collective calls outside of CUDA graphs and for whole trainings, and
    `noisy_run_spread` for everything else.
    """

    hardware: Literal["gpu", "cpu"]
    margin: float
    tolerance: float
    compare_tolerance: float
    first_sets: int
    repeat_sets: int
    run_spread: float
    noisy_run_spread: float
    call_spread: float
    false_alarms: float = 0.01
    metrics: Mapping[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tolerance in (self.tolerance, self.compare_tolerance):
            Limits(margin=self.margin, tolerance=tolerance)
        if not self.run_spread <= self.noisy_run_spread:
            raise ValueError(
                f"run_spread {self.run_spread} must not exceed noisy_run_spread {self.noisy_run_spread}"
            )

    @property
    def device(self) -> str:
        return "cuda" if self.hardware == "gpu" else "cpu"

    def comparing(self, slower_ratio: float | None = None) -> Settings:
        """Return the settings of a comparison with a stored run, which takes fewer process sets.

        slower_ratio: the ratio of times up to which a slow-down does not matter, if the user gives one.
        """
        first, repeat = _COMPARE_SETS[self.hardware]
        settings = replace(
            self,
            tolerance=max(self.tolerance, self.compare_tolerance),
            first_sets=min(first, self.first_sets),
            repeat_sets=min(repeat, self.repeat_sets),
        )
        if slower_ratio is None:
            return settings
        margin = slower_ratio - 1
        wide = {name: limits for name, limits in self.metrics.items() if name != "mean_time"}
        mean = self.metrics.get("mean_time", Limits(margin=0, tolerance=settings.tolerance))
        wide["mean_time"] = Limits(margin=margin, tolerance=max(mean.tolerance, 2 * margin))
        tolerance = max(settings.tolerance, 2 * margin)
        return replace(
            settings, margin=margin, tolerance=tolerance, compare_tolerance=tolerance, metrics=wide
        )

    def with_sets(self, first_sets: int) -> Settings:
        """Return a copy with another number of process sets; a repeat takes at least as many."""
        return replace(self, first_sets=first_sets, repeat_sets=max(first_sets, self.repeat_sets))


# run_spread: on GPUs, step times in CUDA graphs differ by 0.1% to 0.35% between two runs on H200s, on
# one machine or two. On 2 cores of an EPYC, step times differ by 3 to 6%, and collective calls by 20%.
# On GPUs, eager steps differ by 14%, and whole trainings by 1.2%.
_DEFAULTS = {
    "gpu": Settings(
        hardware="gpu",
        margin=0.005,
        tolerance=0.02,
        compare_tolerance=0.03,
        first_sets=3,
        repeat_sets=6,
        run_spread=0.0035,
        noisy_run_spread=0.2,
        call_spread=0.02,
        metrics={
            "mean_time": Limits(margin=0.005, tolerance=0.05),
            "peak_memory_bytes": Limits(margin=0.005, tolerance=0.02),
            "idle_cpus": Limits(margin=0.5, tolerance=1.0),
        },
    ),
    "cpu": Settings(
        hardware="cpu",
        margin=0.01,
        tolerance=0.16,
        compare_tolerance=0.25,
        first_sets=3,
        repeat_sets=5,
        run_spread=0.06,
        noisy_run_spread=0.2,
        call_spread=0.2,
        metrics={"idle_cpus": Limits(margin=0.5, tolerance=1.0)},
    ),
}
# The most process sets per side of a comparison with a stored run: first, and in each repeat.
_COMPARE_SETS = {"gpu": (3, 3), "cpu": (2, 3)}
_METRIC_KEYS = tuple(key.name for key in dataclasses.fields(Limits))
_KEYS = tuple(key.name for key in dataclasses.fields(Settings) if key.name not in ("hardware", "metrics"))
_Changed = TypeVar("_Changed", Settings, Limits)


def read_decision(document: Mapping[str, Any]) -> dict[str, Settings]:
    """Return the settings for gpu and cpu from the [decision] tables of a TOML document.

    Built-in values fill the gaps. Raises ValueError with one sentence for the first wrong value.
    """
    classes = _table(document, "decision", "class", tuple(_DEFAULTS))
    return {hardware: _class_settings(classes, hardware) for hardware in _DEFAULTS}


def _class_settings(classes: Mapping[str, Any], hardware: str) -> Settings:
    header, default = f"decision.{hardware}", _DEFAULTS[hardware]
    values = _table(classes, header, "key", (*_KEYS, "metrics"))
    judged = [metric.name for metric in registry.registered() if metric.gate and not metric.exact]
    by_metric = _table(values, f"{header}.metrics", "metric", judged)
    settings = _changed(default, values, header)
    own = dict(default.metrics)
    for metric in by_metric:
        given = _table(by_metric, f"{header}.metrics.{metric}", "key", _METRIC_KEYS)
        known = own.get(metric, Limits(margin=settings.margin, tolerance=settings.tolerance))
        own[metric] = _changed(known, given, f"{header}.metrics.{metric}")
    return replace(settings, metrics=own)


def _table(parent: Mapping[str, Any], header: str, what: str, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the TOML table with this header, empty if absent; raise ValueError for unknown keys."""
    table = parent.get(header.rpartition(".")[2], {})
    if not isinstance(table, dict):
        raise ValueError(
            f"{NAME} has {header} = {quoted(table)}; write a table, which begins with [{header}]"
        )
    for key in table:
        if key not in known:
            words = _OLD_KEYS.get(key) or advice(key, known)
            state = "old" if key in _OLD_KEYS else "unknown"
            raise ValueError(f"[{header}] of {NAME} has the {state} {what} {quoted(key)}; {words}")
    return table


def _changed(settings: _Changed, table: Mapping[str, Any], header: str) -> _Changed:
    """Return the settings with a table's values; raise ValueError for wrong or contradicting values."""
    place = f"[{header}] of {NAME}"
    values = {key: value for key, value in table.items() if key != "metrics"}
    for key, value in values.items():
        number = type(value) in (int, float) and math.isfinite(value)
        if key in _SET_KEYS:
            valid = type(value) is int and 2 <= value <= MOST_SETS
            wanted = f"a whole number from 2 to {MOST_SETS}"
        elif key in _SPREAD_KEYS:
            valid, wanted = number and 0 < value < 1, "a fraction above 0 and below 1, such as 0.02"
        elif key == "false_alarms":
            valid, wanted = number and 0 < value < 0.5, "a probability above 0 and below 0.5, such as 0.01"
        else:
            valid, wanted = number and 0 <= value <= 10, "a fraction from 0 to 10, such as 0.02"
        if not valid:
            raise ValueError(f"{place} has {key} = {quoted(value)}; write {wanted}")
    try:
        return replace(settings, **values)
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
