"""Lower and upper bounds for the metrics of tests, from perf/thresholds.toml.

Reading the file raises Refused for an entry that could never fail: a misspelt name, a field that no
measurement spec has, or a value that no measurement spec can hold.
"""

from __future__ import annotations

import math
import operator
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused, first_line, quoted
from ddpperf.io.files import read_text
from ddpperf.results import metrics
from ddpperf.results.metrics import Better
from ddpperf.specs import Spec
from ddpperf.verdict.settings import NAME, Settings, advice, read_decision

EVERY_MACHINE = "*"  # the hardware of a threshold that holds on every machine


class BoundKind(StrEnum):
    """Whether a metric must be at least, at most, or exactly its bound."""

    FLOOR = "floor"
    LIMIT = "limit"
    EXACT = "exact"


HOLDS = {BoundKind.FLOOR: operator.ge, BoundKind.LIMIT: operator.le, BoundKind.EXACT: operator.eq}
WORDS_OF_BOUNDS = {
    BoundKind.FLOOR: ("at least", "below", "minimum"),
    BoundKind.LIMIT: ("at most", "above", "maximum"),
    BoundKind.EXACT: ("exactly", "not", "value"),
}


def bound_kind(name: str) -> BoundKind:
    metric = metrics.find(name)
    if metric.exact:
        return BoundKind.EXACT
    return BoundKind.LIMIT if metric.better is Better.LOWER else BoundKind.FLOOR


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One entry of perf/thresholds.toml: bounds for a test's metrics on one hardware key."""

    hardware: str  # a hardware key, or "*" for every machine
    test: str  # the name of the test's function
    where: Mapping[str, object]  # the required values of spec fields; every spec fits an empty `where`
    bounds: Mapping[str, float]  # of metrics in their units; `bound_kind` says in which direction
    number: int  # the entry's place in the file, from 1

    def applies(self, test: str, spec: Spec) -> bool:
        """Return whether this threshold applies to a test with this spec, without regard to the hardware."""
        found = {name: getattr(spec, name, None) for name in self.where}
        return test == self.test and found == self.where


class HardwareThresholds:
    """The thresholds for one hardware key, with a record of those that applied to a test."""

    def __init__(self, thresholds: Sequence[Threshold], hardware_key: str) -> None:
        hardware = (hardware_key, EVERY_MACHINE)
        self._thresholds = [threshold for threshold in thresholds if threshold.hardware in hardware]
        self._checks: dict[tuple[str, int, str], dict[str, Any]] = {}  # by test, threshold and metric

    def violations(self, test: str, function: str, spec: Spec, values: Mapping[str, float]) -> list[str]:
        """Return one sentence for each bound that a test's metrics violate.

        test: the id of the test. A second measurement of the test replaces the first one.
        values: by metric. A missing or infinite value violates its bound.
        """
        found = []
        for threshold in self._thresholds:
            if not threshold.applies(function, spec):
                continue
            for name, bound in threshold.bounds.items():
                value = values.get(name)
                violation = _violation(name, value, bound, f"threshold {threshold.number} of {NAME}")
                found.append(violation)
                self._checks[test, threshold.number, name] = {
                    "test": test,
                    "metric": name,
                    "value": value,
                    "bound": bound,
                    "kind": bound_kind(name),
                    "held": not violation,
                }
        return [violation for violation in found if violation]

    def to_json(self) -> dict[str, Any]:
        """Return the number of thresholds for this hardware, and how each bound that applied was met."""
        return {"known": len(self._thresholds), "checks": list(self._checks.values())}


def _violation(name: str, value: float | None, bound: float, place: str) -> str:
    """Return a sentence if a metric's value violates its bound, or an empty string."""
    metric, kind = metrics.find(name), bound_kind(name)
    least, beyond, end = WORDS_OF_BOUNDS[kind]
    if value is None or not math.isfinite(value):
        wrong = "was not measured" if value is None else f"is {value}, which is no finite number"
        return f"{metric.heading} {wrong}, {place} requires {least} {metric.format(bound)}"
    if HOLDS[kind](value, bound):
        return ""
    forms: tuple[Callable[[float], str], ...] = (metric.format, "{:.6g}".format, repr)
    text = next(form for form in forms if form(value) != form(bound))
    unit = f" {metric.unit}" if text != metric.format and metric.unit != "1" else ""
    return f"{metric.heading} {text(value)}{unit} is {beyond} {text(bound)}{unit}, the {end} of {place}"


# --- reading the file


def read_threshold_file(root: Path) -> tuple[tuple[Threshold, ...], Mapping[str, Settings]]:
    """Read the thresholds and the decision settings from perf/thresholds.toml below `root`.

    Without the file there are no thresholds, and the settings are the defaults. Raises Refused for
    a file with a mistake.
    """
    try:
        document = tomllib.loads(read_text(root / NAME))
    except (FileNotFoundError, NotADirectoryError):
        document = {}
    except UnicodeDecodeError as error:
        raise Refused(f"{NAME} is not in UTF-8 ({error.reason}); save it in UTF-8") from error
    except OSError as error:
        raise Refused(f"{NAME} cannot be read ({error.strerror}); make it a readable file") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{NAME} is not valid TOML ({first_line(error)}); correct that place") from error
    return read_thresholds(document), read_decision(document)


def read_thresholds(document: Mapping[str, Any]) -> tuple[Threshold, ...]:
    """Return the thresholds in a parsed TOML document; raise Refused for the first wrong entry."""
    for key in document:
        if key not in ("threshold", "decision"):
            advised = "begin every entry with [[threshold]], [decision.gpu] or [decision.cpu]"
            raise Refused(f"{NAME} has the unknown key {quoted(key)}; {advised}")
    entries = document.get("threshold", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Refused(f"the key threshold of {NAME} is no list; begin every entry with [[threshold]]")
    thresholds = []
    first: dict[tuple[object, ...], int] = {}
    for number, entry in enumerate(entries, 1):
        try:
            threshold = _threshold(entry, number)
            for metric in threshold.bounds:
                case = (threshold.hardware, threshold.test, frozenset(threshold.where.items()), metric)
                if (other := first.setdefault(case, number)) != number:
                    raise ValueError(f"repeats this case's {metric} of threshold {other}; delete one of them")
        except ValueError as error:
            raise Refused(f"threshold {number} of {NAME} {error}") from error
        thresholds.append(threshold)
    return tuple(thresholds)


def _threshold(entry: Mapping[str, Any], number: int) -> Threshold:
    """Return the threshold of an entry; raise ValueError with what the entry has or does wrong."""
    bounded = [metric.name for metric in metrics.registered() if metric.threshold]
    keys = ("hardware", "test", "where", *bounded)
    for key in entry:
        if key not in keys:
            raise ValueError(f"has the unknown key {quoted(key)}; {advice(key, keys)}")
    for key, example in (("hardware", "h200x4"), ("test", "test_weak_scaling")):
        if key not in entry:
            raise ValueError(f"has no {key}; add one, such as {key} = {example!r}")
        if not isinstance(entry[key], str) or not entry[key]:
            raise ValueError(f"has {key} = {quoted(entry[key])}; write a name, such as {example!r}")
    test, where = entry["test"], entry.get("where", {})
    if not test.isidentifier():
        advised = "write only the function's name, and the case's fields in where"
        raise ValueError(f"has test = {quoted(test)}; {advised}")
    _require_possible(where)
    bounds = {metric: entry[metric] for metric in bounded if metric in entry}
    if not bounds:
        advised = f"add one of {', '.join(bounded)}"
        raise ValueError(f"has no minimum and no maximum, so it could never fail; {advised}")
    for metric, bound in bounds.items():
        if type(bound) not in (int, float) or not 0 < bound <= sys.float_info.max:  # a NaN is refused, too
            raise ValueError(f"has {metric} = {quoted(bound)}; write a positive finite number")
    return Threshold(hardware=entry["hardware"], test=test, where=where, bounds=bounds, number=number)


def _require_possible(where: Any) -> None:
    """Raise ValueError unless some measurement spec has all of these fields and can have their values."""
    if not isinstance(where, dict):
        raise ValueError(f"has where = {quoted(where)}; write a table, such as where = {{ world_size = 4 }}")
    if "delay_seconds" in where:  # a deliberately slowed step must violate the step's thresholds
        raise ValueError("names delay_seconds in where, but holds for delayed steps, too; delete it there")
    kinds = {kind: {field.name for field in fields(kind)} for kind in Spec.kinds.values()}
    known = sorted(set.union(*kinds.values()) - {"delay_seconds"})
    for name in where:
        if name not in known:
            advised = advice(name, known)
            raise ValueError(f"names {quoted(name)} in where, a field that no spec has; {advised}")
    possible = [kind for kind, names in kinds.items() if where.keys() <= names]
    if not possible:
        names = ", ".join(where)
        raise ValueError(f"names {names} in where, but no spec has all of these; keep one spec's fields")
    wrong = [next(kind.wrong_values(where), "") for kind in possible]
    if all(wrong):
        raise ValueError(f"can never apply: {'; or '.join(dict.fromkeys(wrong))}")
