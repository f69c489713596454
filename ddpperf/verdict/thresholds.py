"""What a test's metrics must reach, or must not exceed, on a hardware: perf/thresholds.toml read, checked and applied.

What could never fail is refused: a misspelt name, a field that no spec has, a value that no spec can hold.
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
from ddpperf.specs import Spec
from ddpperf.verdict.settings import DecisionSettings, advice, read_decision

NAME = "perf/thresholds.toml"

METRICS = (
    "speedup",
    "efficiency",
    "images_per_second",
    "busbw_bytes_per_second",
    "test_accuracy",
)  # with a least value
GREATEST = ("cpu_seconds",)  # with a greatest value
NEVER_NAMED = (
    "delay_seconds",
    "fault",
)  # a slowed step must fall below the threshold of the same step without that

Value = str | int | float | bool
_KEYS = ("hardware", "test", "where", *METRICS, *GREATEST)
_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One entry of the file.

    test: the name of the test's function. where: fields of the spec, each equal in value and type; empty for every spec.
    minimum, maximum: by metric, in the metric's own unit; no metric has both. number: the entry's place in the file, from 1.
    """

    hardware: str
    test: str
    where: Mapping[str, Value]
    minimum: Mapping[str, float]
    maximum: Mapping[str, float]
    number: int

    def applies(self, *, hardware: str, test: str, spec: Spec) -> bool:
        """Whether this holds for `spec` as the function `test` measured it, slowed or not."""
        named = ((getattr(spec, name, _ABSENT), value) for name, value in self.where.items())
        return (hardware, test) == (self.hardware, self.test) and all(
            _same(found, wanted) for found, wanted in named
        )

    def violations(self, metrics: Mapping[str, float]) -> list[str]:
        """A sentence for each bound that is not kept; a metric that is absent, or no finite number, keeps none."""
        sentences = []
        for name, bound in {**self.minimum, **self.maximum}.items():
            value = metrics.get(name)
            asked = f"{self} asks for {'at most ' if name in self.maximum else ''}{bound:.6g}"
            if value is None:
                sentences.append(f"{name} was not given, {asked}")
            elif not math.isfinite(value):
                sentences.append(f"{name} is {value}, which is no finite number, {asked}")
            elif name in self.minimum and value < bound:
                sentences.append(f"{name} {value:.6g} is below {bound:.6g}, the least that {self} allows")
            elif name in self.maximum and value > bound:
                sentences.append(f"{name} {value:.6g} is above {bound:.6g}, the greatest that {self} allows")
        return sentences

    def __str__(self) -> str:
        case = ", ".join(f"{name}={value}" for name, value in self.where.items())
        return f"threshold {self.number} ({self.test} on {self.hardware}{', ' if case else ''}{case})"


def read_document(text: str, *, name: str) -> dict[str, Any]:
    """A file's `text` as the tables it holds; raises ValueError with one sentence if it is no TOML. name: the file's."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no TOML that can be read ({error}); mend that place") from error


def read_thresholds(text: str, *, name: str) -> tuple[Threshold, ...]:
    """The entries of a file's `text`; raises ValueError with one sentence for the first that is wrong. name: the file's."""
    return thresholds_in(read_document(text, name=name), name=name)


def thresholds_in(document: Mapping[str, Any], *, name: str) -> tuple[Threshold, ...]:
    """What `read_thresholds`, of a file that was read; its key decision is for settings.py to judge."""
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
        _entry(entry, number, f"threshold {number} of {name}") for number, entry in enumerate(entries, 1)
    )
    _require_distinct(thresholds, name)
    return thresholds


def _entry(entry: dict[str, Any], number: int, place: str) -> Threshold:
    for key in entry:
        if key not in _KEYS:
            raise ValueError(f"{place} has the unknown key {key!r}; {advice(key, _KEYS)}")
    for key, example in (("hardware", "h200x4"), ("test", "test_weak_scaling")):
        if key not in entry:
            raise ValueError(f"{place} has no {key}; add one, such as {key} = {example!r}")
        if not isinstance(entry[key], str) or not entry[key]:
            raise ValueError(f"{place} has {key} = {entry[key]!r}; write a name, such as {example!r}")
    if not entry["test"].isidentifier():
        raise ValueError(
            f"{place} has test = {entry['test']!r}; write only the function's name, and the cell's fields in where"
        )
    where = entry.get("where", {})
    _require_occurs(where, place)
    minimum = {metric: entry[metric] for metric in METRICS if metric in entry}
    maximum = {metric: entry[metric] for metric in GREATEST if metric in entry}
    if not minimum and not maximum:
        metrics = ", ".join(METRICS + GREATEST)
        raise ValueError(
            f"{place} has no minimum and no maximum, so it could never fail; add one of {metrics}"
        )
    for metric, bound in (minimum | maximum).items():
        if type(bound) not in (int, float) or not 0 < bound <= sys.float_info.max:  # nor is a NaN
            raise ValueError(f"{place} has {metric} = {bound!r}; write a positive finite number")
    return Threshold(
        hardware=entry["hardware"],
        test=entry["test"],
        where=where,
        minimum=minimum,
        maximum=maximum,
        number=number,
    )


def _require_occurs(where: Any, place: str) -> None:
    """Raise ValueError unless a spec could have all the fields of `where` with these values."""
    if not isinstance(where, dict):
        raise ValueError(
            f"{place} has where = {where!r}; write a table, such as where = {{ world_size = 4 }}"
        )
    kinds = [_fields(kind) for kind in get_args(Spec)]
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
    first: dict[tuple[object, ...], int] = {}
    for threshold in thresholds:
        for metric in (*threshold.minimum, *threshold.maximum):
            key = (threshold.hardware, threshold.test, frozenset(threshold.where.items()), metric)
            if key in first:
                raise ValueError(
                    f"threshold {threshold.number} of {name} gives the same cell's {metric} as threshold {first[key]}; "
                    "delete one of them"
                )
            first[key] = threshold.number


def _fields(kind: type[Spec]) -> dict[str, Any]:
    """The types of a spec's fields by name."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fits(value: object, hint: Any) -> bool:
    """Whether a field annotated with `hint` can hold `value`, for the types that TOML has."""
    if get_origin(hint) is Literal:
        return any(_same(value, each) for each in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    return type(value) is hint and hint in get_args(Value)


def _describe(hint: Any) -> str:
    """What `_fits`, in words."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        described = (_describe(each).split(" or ") for each in get_args(hint) if each is not type(None))
        return " or ".join(dict.fromkeys(chain.from_iterable(described)))
    return {
        str: "a string",
        int: "a whole number",
        float: "a number with a point",
        bool: "true or false",
    }.get(hint, "nothing")


def _same(one: object, other: object) -> bool:
    """Equal in type too: True is not 1."""
    return type(one) is type(other) and one == other


def read_threshold_file(root: Path) -> tuple[tuple[Threshold, ...], Mapping[str, DecisionSettings]]:
    """Thresholds, and by class of hardware the decision's settings; those built in where there is no file.

    Raises Refused if the file is broken.
    """
    try:
        text = (root / NAME).read_text()
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    except UnicodeDecodeError as error:
        raise Refused(f"{NAME} is not in UTF-8 ({error.reason}); save it as that") from error
    except OSError as error:
        raise Refused(f"{NAME} cannot be read ({error.strerror}); make it a readable file") from error
    try:
        document = read_document(text, name=NAME)
        return thresholds_in(document, name=NAME), read_decision(document, name=NAME)
    except ValueError as error:
        raise Refused(str(error)) from error


class HardwareThresholds:
    """The thresholds for one hardware key, and which of them a test was held to."""

    def __init__(self, thresholds: Sequence[Threshold], hardware_key: str) -> None:
        self._own = [each for each in thresholds if each.hardware == hardware_key]
        self._applied: set[int] = set()  # their numbers

    def violations(self, function: str, spec: Spec, values: Mapping[str, float]) -> list[str]:
        """Those for this test that its metrics do not reach, a sentence each."""
        applying = [
            each for each in self._own if each.applies(hardware=each.hardware, test=function, spec=spec)
        ]
        self._applied |= {each.number for each in applying}
        return [sentence for each in applying for sentence in each.violations(values)]

    def counts(self) -> dict[str, int]:
        return {"applied": len(self._applied), "known": len(self._own)}
