"""Lower and upper bounds for the metrics of tests, from perf/thresholds.toml.

Reading the file raises ValueError for an entry that could never fail: a misspelt name, a field that
no measurement spec has, or a value that no measurement spec can hold.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ddpperf.errors import Refused, first_line, quoted
from ddpperf.io.files import read_text
from ddpperf.results import metrics
from ddpperf.results.metrics import Better
from ddpperf.specs import Spec
from ddpperf.verdict.settings import NAME, Settings, advice, read_decision

NEVER_NAMED = ("delay_seconds",)  # a deliberately slowed step must violate the step's thresholds

Value = str | int | float | bool
_WORDS = {str: "a string", int: "a whole number", float: "a number with a point", bool: "true or false"}


EVERY_MACHINE = "*"  # the hardware of a threshold that holds on every machine


class BoundKind(StrEnum):
    """Whether a metric must be at least, at most, or exactly its bound."""

    FLOOR = "floor"
    LIMIT = "limit"
    EXACT = "exact"


WORDS_OF_BOUNDS = {
    BoundKind.FLOOR: ("at least", "below", "minimum"),
    BoundKind.LIMIT: ("at most", "above", "maximum"),
    BoundKind.EXACT: ("exactly", "not", "value"),
}


def bound_kind(name: str) -> BoundKind:
    """Return in which direction a threshold bounds the metric with this name."""
    metric = metrics.find(name)
    if metric.exact:
        return BoundKind.EXACT
    return BoundKind.LIMIT if metric.better is Better.LOWER else BoundKind.FLOOR


def holds(kind: BoundKind, value: float, bound: float) -> bool:
    """Return whether the value of a metric keeps its bound."""
    match kind:
        case BoundKind.FLOOR:
            return value >= bound
        case BoundKind.LIMIT:
            return value <= bound
        case BoundKind.EXACT:
            return value == bound


@dataclass(frozen=True, kw_only=True)
class Check:
    """A metric of a test that was compared with the bound of a threshold.

    value: the metric's value, or None if it was not measured.
    """

    test: str
    metric: str
    value: float | None
    bound: float
    kind: BoundKind
    held: bool


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One entry of perf/thresholds.toml: bounds for a test's metrics on one hardware key.

    `hardware` is a hardware key, or "*" for every machine. `where` holds the required values of
    measurement spec fields, compared with their types; an empty `where` fits every spec. `bounds`
    holds the least value, or the greatest if lower is better, of each metric in its unit. The bound
    of an exact metric is the only value that it may have. `number` is the entry's place in the
    file, from 1.
    """

    hardware: str
    test: str
    where: Mapping[str, Value]
    bounds: Mapping[str, float]
    number: int

    def applies(self, test: str, spec: Spec) -> bool:
        """Return whether this threshold applies to a test with this spec, without regard to the hardware."""
        return test == self.test and all(
            hasattr(spec, name) and _same(getattr(spec, name), value) for name, value in self.where.items()
        )

    def violations(self, values: Mapping[str, float]) -> list[str]:
        """Return one sentence for each bound of this threshold that the values violate.

        A missing or infinite value violates its bound.
        """
        place = f"threshold {self.number} of {NAME}"
        found = (_violation(name, values.get(name), bound, place) for name, bound in self.bounds.items())
        return [sentence for sentence in found if sentence]


def _violation(name: str, value: float | None, bound: float, place: str) -> str:
    """Return a sentence if a metric's value violates its bound, or an empty string."""
    metric, kind = metrics.find(name), bound_kind(name)
    least, beyond, end = WORDS_OF_BOUNDS[kind]
    if value is None or not math.isfinite(value):
        wrong = "was not measured" if value is None else f"is {value}, which is no finite number"
        return f"{metric.heading} {wrong}, {place} requires {least} {metric.format(bound)}"
    if holds(kind, value, bound):
        return ""
    forms: tuple[Callable[[float], str], ...] = (metric.format, "{:.6g}".format, repr)
    text = next(form for form in forms if form(value) != form(bound))
    unit = f" {metric.unit}" if text != metric.format and metric.unit != "1" else ""
    return f"{metric.heading} {text(value)}{unit} is {beyond} {text(bound)}{unit}, the {end} of {place}"


class HardwareThresholds:
    """The thresholds for one hardware key, with a record of those that applied to a test."""

    def __init__(self, thresholds: Sequence[Threshold], hardware_key: str) -> None:
        hardware = (hardware_key, EVERY_MACHINE)
        self._thresholds = [threshold for threshold in thresholds if threshold.hardware in hardware]
        self._checks: dict[tuple[str, int, str], Check] = {}

    def violations(self, test: str, function: str, spec: Spec, values: Mapping[str, float]) -> list[str]:
        """Return one sentence for each threshold that a test's metrics violate.

        test: the id of the test. A second measurement of the test replaces the first one.
        """
        applying = [threshold for threshold in self._thresholds if threshold.applies(function, spec)]
        for threshold in applying:
            for name, bound in threshold.bounds.items():
                value, kind = values.get(name), bound_kind(name)
                held = value is not None and math.isfinite(value) and holds(kind, value, bound)
                self._checks[test, threshold.number, name] = Check(
                    test=test, metric=name, value=value, bound=bound, kind=kind, held=held
                )
        return [sentence for threshold in applying for sentence in threshold.violations(values)]

    def to_json(self) -> dict[str, Any]:
        """Return the number of thresholds for this hardware, and how each one that applied was met."""
        return {
            "applied": len({number for _, number, _ in self._checks}),
            "known": len(self._thresholds),
            "checks": [dataclasses.asdict(check) for check in self._checks.values()],
        }


# --- reading the file


def read_threshold_file(root: Path) -> tuple[tuple[Threshold, ...], Mapping[str, Settings]]:
    """Read the thresholds and the decision settings from perf/thresholds.toml below `root`.

    Without the file there are no thresholds, and the settings are the defaults. Raises Refused for
    a file with a mistake.
    """
    try:
        text = read_text(root / NAME)
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    except UnicodeDecodeError as error:
        raise Refused(f"{NAME} is not in UTF-8 ({error.reason}); save it in UTF-8") from error
    except OSError as error:
        raise Refused(f"{NAME} cannot be read ({error.strerror}); make it a readable file") from error
    try:
        document = read_document(text)
        return read_thresholds(document), read_decision(document)
    except ValueError as error:
        raise Refused(str(error)) from error


def read_document(text: str) -> dict[str, Any]:
    """Parse the text of perf/thresholds.toml; raise ValueError if it is not valid TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} is not valid TOML ({first_line(error)}); correct that place") from error


def read_thresholds(document: Mapping[str, Any]) -> tuple[Threshold, ...]:
    """Return the thresholds in a parsed TOML document; raise ValueError for the first wrong entry."""
    for key in document:
        if key not in ("threshold", "decision"):
            raise ValueError(
                f"{NAME} has the unknown key {quoted(key)}; begin every entry with [[threshold]], "
                "and the decision's values with [decision.gpu] or [decision.cpu]"
            )
    entries = document.get("threshold", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f"the key threshold of {NAME} is no list of entries; begin every entry with [[threshold]]"
        )
    thresholds = tuple(_threshold(entry, number) for number, entry in enumerate(entries, 1))
    first: dict[tuple[object, ...], int] = {}
    for threshold in thresholds:
        for metric in threshold.bounds:
            case = (threshold.hardware, threshold.test, frozenset(threshold.where.items()), metric)
            if (other := first.setdefault(case, threshold.number)) != threshold.number:
                place = f"threshold {threshold.number} of {NAME}"
                raise ValueError(
                    f"{place} gives the same case's {metric} as threshold {other}; delete one of them"
                )
    return thresholds


def bounded_metrics(better: Better) -> tuple[str, ...]:
    """Return the metrics that a threshold may bound, from below if higher is better."""
    return tuple(m.name for m in metrics.registered() if m.threshold and m.better is better)


def _threshold(entry: dict[str, Any], number: int) -> Threshold:
    place = f"threshold {number} of {NAME}"
    bounded = bounded_metrics(Better.HIGHER) + bounded_metrics(Better.LOWER)
    keys = ("hardware", "test", "where", *bounded)
    for key in entry:
        if key not in keys:
            raise ValueError(f"{place} has the unknown key {quoted(key)}; {advice(key, keys)}")
    for key, example in (("hardware", "h200x4"), ("test", "test_weak_scaling")):
        if key not in entry:
            raise ValueError(f"{place} has no {key}; add one, such as {key} = {example!r}")
        if not isinstance(entry[key], str) or not entry[key]:
            raise ValueError(f"{place} has {key} = {quoted(entry[key])}; write a name, such as {example!r}")
    hardware, test, where = entry["hardware"], entry["test"], entry.get("where", {})
    if not test.isidentifier():
        advised = "write only the function's name, and the case's fields in where"
        raise ValueError(f"{place} has test = {quoted(test)}; {advised}")
    _require_possible(where, place)
    bounds = {metric: entry[metric] for metric in bounded if metric in entry}
    if not bounds:
        advised = f"add one of {', '.join(bounded)}"
        raise ValueError(f"{place} has no minimum and no maximum, so it could never fail; {advised}")
    for metric, bound in bounds.items():
        if type(bound) not in (int, float) or not 0 < bound <= sys.float_info.max:  # a NaN is refused, too
            raise ValueError(f"{place} has {metric} = {quoted(bound)}; write a positive finite number")
    return Threshold(hardware=hardware, test=test, where=where, bounds=bounds, number=number)


def _require_possible(where: Any, place: str) -> None:
    """Raise ValueError unless a measurement spec with all of the given field values is possible."""
    if not isinstance(where, dict):
        example = "where = { world_size = 4 }"
        raise ValueError(f"{place} has where = {quoted(where)}; write a table, such as {example}")
    kinds = _spec_fields()
    known = sorted({name for fields in kinds for name in fields} - set(NEVER_NAMED))
    for name, value in where.items():
        if name in NEVER_NAMED:
            raise ValueError(f"{place} names {name} in where, but holds with and without it; delete {name}")
        if name not in known:
            advised = advice(name, known)
            raise ValueError(f"{place} names {quoted(name)} in where, a field that no spec has; {advised}")
        choices = [choice for fields in kinds for choice in fields.get(name, ())]
        if not _fits(value, choices):
            raise ValueError(f"{place} has {name} = {quoted(value)} in where; write {_describe(choices)}")
    if not any(all(_fits(where[name], fields.get(name, ())) for name in where) for fields in kinds):
        names = ", ".join(where)
        raise ValueError(
            f"{place} names {names} in where, but no spec has all of these; keep one spec's fields"
        )


@cache
def _spec_fields() -> list[dict[str, list[Any]]]:
    """Return for each kind of spec the types, and the values of a Literal, that its fields can hold."""
    hints = {kind: get_type_hints(kind) for kind in Spec.kinds.values()}
    return [
        {field.name: _choices(hints[kind][field.name]) for field in dataclasses.fields(kind)}
        for kind in hints
    ]


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) in (Literal, Union, types.UnionType):
        return [choice for argument in get_args(hint) for choice in _choices(argument)]
    return [hint]


def _fits(value: object, choices: Sequence[Any]) -> bool:
    return any(_same(value, choice) or (type(value) is choice and choice in _WORDS) for choice in choices)


def _describe(choices: Sequence[Any]) -> str:
    words = [
        repr(choice) if isinstance(choice, get_args(Value)) else _WORDS.get(choice, "nothing")
        for choice in choices
        if choice is not type(None)
    ]
    return " or ".join(dict.fromkeys(words))


def _same(one: object, other: object) -> bool:
    """Return whether two values are equal and have the same type, so that 1 is not True."""
    return type(one) is type(other) and one == other
