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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ddpperf.errors import Refused
from ddpperf.results import metrics
from ddpperf.results.metrics import Better
from ddpperf.specs import Spec
from ddpperf.verdict.settings import DecisionSettings, advice, read_decision

NAME = "perf/thresholds.toml"
NEVER_NAMED = ("delay_seconds", "fault")  # a deliberately slowed step must violate the step's thresholds

Value = str | int | float | bool
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One entry of perf/thresholds.toml: bounds for a test's metrics on one hardware key.

    `where` holds the required values of measurement spec fields, compared with their types; an
    empty `where` fits every spec. `minimum` and `maximum` map metric names to bounds in the
    metric's unit. `number` is the entry's place in the file, from 1.
    """

    hardware: str
    test: str
    where: Mapping[str, Value]
    minimum: Mapping[str, float]
    maximum: Mapping[str, float]
    number: int

    def applies(self, *, hardware: str, test: str, spec: Spec) -> bool:
        """Return whether this threshold applies to a measurement of a test on some hardware."""
        if (hardware, test) != (self.hardware, self.test):
            return False
        return all(_same(getattr(spec, name, _ABSENT), value) for name, value in self.where.items())

    def violations(self, metrics: Mapping[str, float]) -> list[str]:
        """Return one sentence for each bound of this threshold that the metrics violate.

        A missing or infinite value violates its bound.
        """
        sentences = []
        for name, bound in {**self.minimum, **self.maximum}.items():
            value = metrics.get(name)
            required = f"{self} requires {'at most' if name in self.maximum else 'at least'} {bound:.6g}"
            if value is None:
                sentences.append(f"{name} was not measured, {required}")
            elif not math.isfinite(value):
                sentences.append(f"{name} is {value}, which is no finite number, {required}")
            elif name in self.minimum and value < bound:
                sentences.append(f"{name} {value:.6g} is below {bound:.6g}, the minimum of {self}")
            elif name in self.maximum and value > bound:
                sentences.append(f"{name} {value:.6g} is above {bound:.6g}, the maximum of {self}")
        return sentences

    def __str__(self) -> str:
        case = "".join(f", {name}={value}" for name, value in self.where.items())
        return f"threshold {self.number} ({self.test} on {self.hardware}{case})"


class HardwareThresholds:
    """The thresholds for one hardware key, with a count of those that applied to a test."""

    def __init__(self, thresholds: Sequence[Threshold], hardware_key: str) -> None:
        self._thresholds = [threshold for threshold in thresholds if threshold.hardware == hardware_key]
        self._hardware_key = hardware_key
        self._applied: set[int] = set()

    def violations(self, function: str, spec: Spec, values: Mapping[str, float]) -> list[str]:
        """Return one sentence for each threshold that a test's metrics violate."""
        applying = [
            threshold
            for threshold in self._thresholds
            if threshold.applies(hardware=self._hardware_key, test=function, spec=spec)
        ]
        self._applied |= {threshold.number for threshold in applying}
        return [sentence for threshold in applying for sentence in threshold.violations(values)]

    def counts(self) -> dict[str, int]:
        """Return the number of thresholds for this hardware, and how many applied to a test."""
        return {"applied": len(self._applied), "known": len(self._thresholds)}


# --- reading the file


def read_threshold_file(root: Path) -> tuple[tuple[Threshold, ...], Mapping[str, DecisionSettings]]:
    """Read the thresholds and the decision settings from perf/thresholds.toml below `root`.

    Without the file there are no thresholds, and the settings are the defaults. Raises Refused for
    a file with a mistake.
    """
    try:
        text = (root / NAME).read_text()
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    except UnicodeDecodeError as error:
        raise Refused(f"{NAME} is not in UTF-8 ({error.reason}); save it in UTF-8") from error
    except OSError as error:
        raise Refused(f"{NAME} cannot be read ({error.strerror}); make it a readable file") from error
    try:
        document = read_document(text, name=NAME)
        return thresholds_in(document, name=NAME), read_decision(document, name=NAME)
    except ValueError as error:
        raise Refused(str(error)) from error


def read_document(text: str, *, name: str) -> dict[str, Any]:
    """Parse TOML text; raise ValueError with the file's `name` if it is not valid TOML."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid TOML ({error}); correct that place") from error


def read_thresholds(text: str, *, name: str) -> tuple[Threshold, ...]:
    """Parse the thresholds in TOML text; raise ValueError for the first wrong entry."""
    return thresholds_in(read_document(text, name=name), name=name)


def thresholds_in(document: Mapping[str, Any], *, name: str) -> tuple[Threshold, ...]:
    """Return the thresholds in a parsed TOML document; raise ValueError for the first wrong entry."""
    for key in document:
        if key not in ("threshold", "decision"):
            raise ValueError(
                f"{name} has the unknown key {key!r}; begin every entry with [[threshold]], "
                "and the decision's values with [decision.gpu] or [decision.cpu]"
            )
    entries = document.get("threshold", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(
            f"the key threshold of {name} is no list of entries; begin every entry with [[threshold]]"
        )
    thresholds = tuple(
        _threshold(entry, number, f"threshold {number} of {name}") for number, entry in enumerate(entries, 1)
    )
    _require_distinct(thresholds, name)
    return thresholds


def bounded_metrics(better: Better) -> tuple[str, ...]:
    """Return the metrics that a threshold may bound, from below if higher is better."""
    return tuple(m.name for m in metrics.registered() if m.threshold and m.better is better)


def _threshold(entry: dict[str, Any], number: int, place: str) -> Threshold:
    floors, ceilings = bounded_metrics(Better.HIGHER), bounded_metrics(Better.LOWER)
    keys = ("hardware", "test", "where", *floors, *ceilings)
    for key in entry:
        if key not in keys:
            raise ValueError(f"{place} has the unknown key {key!r}; {advice(key, keys)}")
    for key, example in (("hardware", "h200x4"), ("test", "test_weak_scaling")):
        if key not in entry:
            raise ValueError(f"{place} has no {key}; add one, such as {key} = {example!r}")
        if not isinstance(entry[key], str) or not entry[key]:
            raise ValueError(f"{place} has {key} = {entry[key]!r}; write a name, such as {example!r}")
    if not entry["test"].isidentifier():
        raise ValueError(
            f"{place} has test = {entry['test']!r}; write only the function's name, and the case's fields "
            "in where"
        )
    where = entry.get("where", {})
    _require_possible(where, place)
    minimum = {metric: entry[metric] for metric in floors if metric in entry}
    maximum = {metric: entry[metric] for metric in ceilings if metric in entry}
    if not minimum and not maximum:
        known = ", ".join(floors + ceilings)
        raise ValueError(f"{place} has no minimum and no maximum, so it could never fail; add one of {known}")
    for metric, bound in (minimum | maximum).items():
        if type(bound) not in (int, float) or not 0 < bound <= sys.float_info.max:  # a NaN is refused, too
            raise ValueError(f"{place} has {metric} = {bound!r}; write a positive finite number")
    return Threshold(
        hardware=entry["hardware"],
        test=entry["test"],
        where=where,
        minimum=minimum,
        maximum=maximum,
        number=number,
    )


def _require_possible(where: Any, place: str) -> None:
    """Raise ValueError unless some measurement spec can have all these field values."""
    if not isinstance(where, dict):
        raise ValueError(
            f"{place} has where = {where!r}; write a table, such as where = {{ world_size = 4 }}"
        )
    kinds = [_field_types(kind) for kind in get_args(Spec)]
    known = sorted({name for fields in kinds for name in fields} - set(NEVER_NAMED))
    for name, value in where.items():
        if name in NEVER_NAMED:
            raise ValueError(f"{place} names {name} in where, but holds with and without it; delete {name}")
        if name not in known:
            raise ValueError(
                f"{place} names {name!r} in where, a field that no spec has; {advice(name, known)}"
            )
        hints = list(dict.fromkeys(fields[name] for fields in kinds if name in fields))
        if not any(_fits(value, hint) for hint in hints):
            raise ValueError(
                f"{place} has {name} = {value!r} in where; write {' or '.join(map(_describe, hints))}"
            )
    if not any(
        all(name in fields and _fits(value, fields[name]) for name, value in where.items())
        for fields in kinds
    ):
        raise ValueError(
            f"{place} names {', '.join(where)} in where, but no spec has all of these; keep one spec's fields"
        )


def _require_distinct(thresholds: Sequence[Threshold], name: str) -> None:
    """Raise ValueError if two thresholds bound the same metric of the same test case."""
    first: dict[tuple[object, ...], int] = {}
    for threshold in thresholds:
        for metric in (*threshold.minimum, *threshold.maximum):
            key = (threshold.hardware, threshold.test, frozenset(threshold.where.items()), metric)
            if first.setdefault(key, threshold.number) != threshold.number:
                raise ValueError(
                    f"threshold {threshold.number} of {name} gives the same case's {metric} as threshold "
                    f"{first[key]}; delete one of them"
                )


def _field_types(kind: type[Spec]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fits(value: object, hint: Any) -> bool:
    """Return whether a field with this type annotation can hold this value from TOML."""
    if get_origin(hint) is Literal:
        return any(_same(value, choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    return type(value) is hint and hint in get_args(Value)


def _describe(hint: Any) -> str:
    """Return the values that a field with this type annotation can hold, in words."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        described = (_describe(choice).split(" or ") for choice in get_args(hint) if choice is not type(None))
        return " or ".join(dict.fromkeys(chain.from_iterable(described)))
    words = {str: "a string", int: "a whole number", float: "a number with a point", bool: "true or false"}
    return words.get(hint, "nothing")


def _same(one: object, other: object) -> bool:
    """Return whether two values are equal and have the same type, so that 1 is not True."""
    return type(one) is type(other) and one == other
