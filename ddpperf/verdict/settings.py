"""The settings that decide whether a difference counts as a change, such as margins.

Each hardware class and each metric may have its own numbers. These come from [decision] in
perf/thresholds.toml, with built-in defaults.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from ddpperf.errors import Refused, quoted
from ddpperf.results import metrics as registry

NAME = "perf/thresholds.toml"
MOST_SETS = 64  # the most process sets of each of base and candidate in one run


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
    """The settings that decide comparisons on one hardware class. The defaults are those of GPUs.

    `margin` and `tolerance` are the limits of times on the CPU, and of steps and calls in a CUDA
    graph on GPUs. `metrics` has the limits of other metrics. Spreads are usual standard deviations of
    the log of a time between two runs of the same code.
    """

    hardware: Literal["gpu", "cpu"] = "gpu"
    margin: float = 0.0015  # equal sides differed by 0.28% once of 30 times, but not in a repeat, too
    tolerance: float = 0.02
    compare_tolerance: float = 0.03  # of a comparison with a stored run, which has less time
    first_sets: int = 3  # process sets of each side in the first A/B measurement
    repeat_sets: int = 6  # the same in each repeat
    false_alarms: float = 0.01  # largest probability of a FAIL if nothing exceeds its margin
    # In CUDA graphs, step times differ by 0.1% to 0.35% between two runs on H200s, on one machine or two.
    run_spread: float = 0.0035  # on the CPU, and in CUDA graphs
    noisy_run_spread: float = 0.2  # of everything else; eager steps on GPUs differ by 14%
    call_spread: float = 0.02  # of collectives outside of CUDA graphs, and of trainings, which differ by 1.2%
    metrics: Mapping[str, Limits] = field(
        default_factory=lambda: {
            "mean_time": Limits(margin=0.005, tolerance=0.05),
            "peak_memory_bytes": Limits(margin=0.005, tolerance=0.02),
            "idle_cpus": Limits(margin=0.5, tolerance=1.0),
        }
    )

    def __post_init__(self) -> None:
        replace(self.limits, tolerance=self.compare_tolerance)  # checks both tolerances

    @property
    def limits(self) -> Limits:
        """The limits of times, unless a metric has its own."""
        return Limits(margin=self.margin, tolerance=self.tolerance)

    @property
    def device(self) -> str:
        return "cuda" if self.hardware == "gpu" else "cpu"

    def comparing(self, slower_ratio: float | None = None) -> Settings:
        """Return the settings of a comparison with a stored run, which takes fewer process sets.

        slower_ratio: the ratio of times up to which a slow-down does not matter, if the user gives one.
        """
        tolerance = max(self.tolerance, self.compare_tolerance)
        margin, by_metric = self.margin, dict(self.metrics)
        for name in by_metric.keys() & {"time", "mean_time"}:  # a table of one with a margin alone
            if by_metric[name].tolerance == self.tolerance:
                by_metric[name] = replace(by_metric[name], tolerance=tolerance)
        if slower_ratio is not None:
            margin = slower_ratio - 1
            tolerance = max(tolerance, 2 * margin)
            for name in by_metric.keys() & {"time", "mean_time"}:
                by_metric[name] = Limits(margin=margin, tolerance=max(by_metric[name].tolerance, 2 * margin))
        return replace(
            self,
            margin=margin,
            tolerance=tolerance,
            compare_tolerance=tolerance,
            first_sets=min(3, self.first_sets),
            repeat_sets=min(3, self.repeat_sets),
            metrics=by_metric,
        )

    def with_sets(self, first_sets: int) -> Settings:
        """Return a copy with another number of process sets; a repeat takes at least as many."""
        return replace(self, first_sets=first_sets, repeat_sets=max(first_sets, self.repeat_sets))


_DEFAULTS = {
    "gpu": Settings(),
    "cpu": Settings(
        hardware="cpu",
        margin=0.01,
        tolerance=0.16,
        compare_tolerance=0.25,
        repeat_sets=5,
        run_spread=0.06,  # on 2 cores of an EPYC, step times differ by 3 to 6%, and collective calls by 20%
        call_spread=0.2,
        metrics={"idle_cpus": Limits(margin=0.5, tolerance=1.0)},
    ),
}
_Changed = TypeVar("_Changed", Settings, Limits)


def read_decision(document: Mapping[str, Any]) -> dict[str, Settings]:
    """Return the settings for gpu and cpu from the [decision] tables of a TOML document.

    Built-in values fill the gaps. Raises Refused for a misspelt name, a value out of range, and values
    that contradict each other.
    """
    judged = [metric.name for metric in registry.registered() if metric.gate and not metric.exact]
    classes = _table(document, "decision", _DEFAULTS)
    found = {}
    for hardware, default in _DEFAULTS.items():
        header = f"decision.{hardware}"
        settings = _changed(default, classes, header)
        tables = _table(classes.get(hardware, {}), f"{header}.metrics", judged)
        by_metric = dict(settings.metrics)
        for metric in tables:
            own = by_metric.get(metric, settings.limits)
            by_metric[metric] = _changed(own, tables, f"{header}.metrics.{metric}")
        found[hardware] = replace(settings, metrics=by_metric)
    return found


def _table(parent: Mapping[str, Any], header: str, known: Collection[str]) -> Mapping[str, Any]:
    """Return the TOML table with this header, empty if absent; raise Refused for unknown keys."""
    table = parent.get(header.rpartition(".")[2], {})
    if not isinstance(table, dict):
        raise Refused(f"{NAME} has {header} = {quoted(table)}; write a table, which begins with [{header}]")
    for key in table:
        if key not in known:
            raise Refused(f"[{header}] of {NAME} has the unknown key {quoted(key)}; {advice(key, known)}")
    return table


def _changed(settings: _Changed, parent: Mapping[str, Any], header: str) -> _Changed:
    """Return the settings with the values of a table; raise Refused for wrong or contradicting values."""
    place = f"[{header}] of {NAME}"
    table = _table(parent, header, [key.name for key in fields(settings) if key.name != "hardware"])
    values = {key: value for key, value in table.items() if key != "metrics"}
    for key, value in values.items():
        number = value if type(value) in (int, float) else math.nan  # a NaN is in no range
        if key in ("first_sets", "repeat_sets"):
            valid = type(value) is int and 2 <= value <= MOST_SETS
            wanted = f"a whole number from 2 to {MOST_SETS}"
        elif key in ("run_spread", "noisy_run_spread", "call_spread"):
            valid, wanted = 0 < number < 1, "a fraction above 0 and below 1, such as 0.02"
        elif key == "false_alarms":
            valid, wanted = 0 < number < 0.5, "a probability above 0 and below 0.5, such as 0.01"
        else:
            valid, wanted = 0 <= number <= 10, "a fraction from 0 to 10, such as 0.02"
        if not valid:
            raise Refused(f"{place} has {key} = {quoted(value)}; write {wanted}")
    try:
        return replace(settings, **values)
    except ValueError as error:
        raise Refused(f"{place} contradicts itself or a default ({error}); change one of them") from error


def advice(word: str, known: Collection[str]) -> str:
    """Return advice for a misspelt word: the nearest known word, or the first known words."""
    if nearest := get_close_matches(word, known, n=1):
        return f"write {nearest[0]}"
    return f"use {textwrap.shorten(', '.join(known), 150, placeholder=' ...')}"
