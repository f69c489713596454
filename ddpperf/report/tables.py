"""A stored run as tables, one for each experiment.

What is the same in all rows of a table stands in its heading. The columns are what varies, the time,
its comparison, and the metrics of the experiment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ddpperf.report.experiment_columns import EXPERIMENTS
from ddpperf.report.round_warnings import spread
from ddpperf.report.stored_cases import (
    Case,
    all_in_words,
    cases_of,
    in_words,
    usual_properties,
    usual_strategy,
)
from ddpperf.results.metrics import column as column_format
from ddpperf.results.metrics import find_or_plain
from ddpperf.results.outcomes import OutcomeKind

ONLY_WHERE_IT_VARIES = ("memory format",)  # properties that no heading names
EXPOSED = ("exposed_comm_seconds", "traced_exposed_comm_seconds")  # by difference and by trace
OTHER = "other"  # than the parts of a step
NO_USE = 10.0  # an interval whose ends differ by this factor says nothing


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: its heading, its unit or "", and a text for each row.

    is_text: whether the cells are no numbers. usual: the cell of what the run does by default.
    """

    heading: str
    unit: str = ""
    cells: tuple[str, ...]
    is_text: bool = False
    usual: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The results of an experiment.

    common: what is the same in all rows. properties: columns that distinguish the rows. figures:
    columns with results, the most important first. marks: for each row, the numbers of its
    warnings. warnings: the warnings that no earlier table has, by their numbers. notes:
    explanations of results.
    """

    title: str
    common: tuple[str, ...]
    properties: tuple[Column, ...]
    figures: tuple[Column, ...]
    tests: tuple[str, ...]
    marks: tuple[tuple[int, ...], ...]
    warnings: Mapping[int, str]
    notes: tuple[str, ...]

    def brief(self, count: int) -> Table:
        """Return this table with so many rows, evenly chosen from those with usual properties."""
        rows = range(len(self.tests))
        named = [column for column in self.properties if column.usual]
        usual = [row for row in rows if all(column.cells[row] in ("-", column.usual) for column in named)]
        others = [row for row in rows if row not in usual]
        step = max(1, (len(usual) - 1) / max(1, count - 1))
        chosen = list(dict.fromkeys(usual[round(place * step)] for place in range(min(count, len(usual)))))
        kept = sorted([*chosen, *others][:count])

        def cut(columns: tuple[Column, ...]) -> tuple[Column, ...]:
            return tuple(
                replace(column, cells=tuple(column.cells[row] for row in kept)) for column in columns
            )

        properties = cut(self.properties)
        equal = [column for column in properties if column.heading and len(set(column.cells)) == 1]
        common = (in_words(column.heading, column.cells[0]) for column in equal if column.cells[0] != "-")
        marks = tuple(self.marks[row] for row in kept)
        shown = {number for numbers in marks for number in numbers}
        return replace(
            self,
            common=(*self.common, *common),
            properties=tuple(column for column in properties if column not in equal),
            figures=cut(self.figures),
            tests=tuple(self.tests[row] for row in kept),
            marks=marks,
            warnings={number: text for number, text in self.warnings.items() if number in shown},
        )


def tables_of(document: Mapping[str, Any]) -> list[Table]:
    """Return a table for each experiment of a stored run, in the order of EXPERIMENTS; others follow.

    A warning has the same number in all tables.
    """
    known = dict.fromkeys(experiment.title for experiment in EXPERIMENTS.values())
    by_title: dict[str, list[Case]] = {title: [] for title in known}
    for case in cases_of(document):
        by_title.setdefault(case.experiment.title, []).append(case)
    numbers: dict[str, int] = {}
    return [_table(cases, numbers) for cases in by_title.values() if cases]


def _table(cases: Sequence[Case], numbers: dict[str, int]) -> Table:
    """Return the table of an experiment. Warnings without a number are added to `numbers`."""
    properties, distinct = distinguished(cases)
    usual = usual_properties(cases[0].header)
    common = all_in_words(properties, usual=usual, without=ONLY_WHERE_IT_VARIES)
    time, metrics = _times(cases), _metrics(cases)
    figures = [*metrics, *time] if cases[0].experiment.time_last else [*time, *metrics]
    same = [column for column in figures if len(cases) > 1 and len(set(column.cells)) == 1]
    common += [" ".join(filter(None, (column.heading, column.cells[0], column.unit))) for column in same]
    figures = [column for column in figures if column not in same]
    if any(column.heading == OTHER and "-" in "".join(column.cells) for column in figures):
        common.append("marks between parts take time, so other can be below 0")
    if any(case.outcome != OutcomeKind.PASSED for case in cases):
        outcomes = tuple(case.outcome for case in cases)
        figures.insert(0, Column(heading="outcome", cells=outcomes, is_text=True))
    known = len(numbers)
    for warning in (warning for case in cases for warning in case.warnings):
        numbers.setdefault(warning, len(numbers) + 1)
    return Table(
        title=cases[0].experiment.title,
        common=tuple(common),
        properties=distinct,
        figures=tuple(figures),
        tests=tuple(case.test for case in cases),
        marks=tuple(tuple(sorted(numbers[warning] for warning in case.warnings)) for case in cases),
        warnings={number: warning for warning, number in numbers.items() if number > known},
        notes=tuple(dict.fromkeys(note for case in cases for note in case.notes)),
    )


def distinguished(cases: Sequence[Case]) -> tuple[dict[str, str], tuple[Column, ...]]:
    """Return the properties that all cases share, and columns of the properties that vary.

    If two cases differ in another property, there is a column with their test ids, too.
    """
    rows = [_with_kind_of_batch(case) for case in cases]
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value)
    usual = usual_properties(cases[0].header) | {"strategy": usual_strategy(cases)}
    common: dict[str, str] = {}
    columns: list[Column] = []
    for name in names:
        values = [row.get(name, "") for row in rows]
        different = set(values) - {""}
        if len(different) <= 1 and (name != "kind" or "" not in values):
            common |= dict.fromkeys(different and [name], *different)
            continue
        cells = tuple(value or "-" for value in values)
        numeric = all(cell.replace(",", "").isdigit() for cell in cells)
        heading = "" if name == "kind" else name
        columns.append(Column(heading=heading, cells=cells, is_text=not numeric, usual=usual.get(name, "")))
    rows_differ = len(set(zip(*(column.cells for column in columns), strict=True))) == len(cases)
    if not rows_differ and len(cases) > 1:
        tests = tuple(case.test.rpartition("[")[-1].removesuffix("]") for case in cases)
        columns.insert(0, Column(heading="case", cells=tests, is_text=True))
    return common, tuple(columns)


def _with_kind_of_batch(case: Case) -> dict[str, str]:
    """Return the properties of a case. In weak and strong scaling, the batch says what it counts."""
    found = case.properties
    if not found["kind"]:
        return found
    counts = {"batch": "per rank", "global batch": "in all"}
    return {
        "batch" if name in counts else name: f"{value} {counts[name]}" if name in counts else value
        for name, value in found.items()
    }


def _times(cases: Sequence[Case]) -> list[Column]:
    if not any(case.experiment.timed for case in cases):
        return []
    works = {case.timed_work for case in cases}
    times = _seconds(works.pop() if len(works) == 1 else "time", [case.seconds for case in cases])
    spreads = tuple("-" if (found := spread(case.measured)) is None else f"{found:.0%}" for case in cases)
    return [times] if set(spreads) == {"-"} else [times, Column(heading="IQR", cells=spreads)]


def _metrics(cases: Sequence[Case]) -> list[Column]:
    """Return a column for each metric that the experiment's table shows."""
    known = dict.fromkeys(name for case in cases for name in case.metrics)
    ends = {f"{name}_{end}" for name in known for end in ("low", "high")}
    patterns = dict.fromkeys(pattern for case in cases for pattern in case.experiment.metrics.split())
    names = [name for pattern in patterns for name in known if fnmatchcase(name, pattern)]
    columns: list[Column] = []
    for name in dict.fromkeys(names):
        if name in ends or (name == EXPOSED[1] and EXPOSED[0] in names):
            continue
        columns += _reference(cases, name)
        columns.append(_exposed(cases) if name == EXPOSED[0] else _metric(cases, name))
        if name == "optimizer_seconds":  # the last part of a step
            columns.append(_seconds(OTHER, [case.other_seconds for case in cases]))
    return columns


def _seconds(heading: str, values: Sequence[float | None]) -> Column:
    _, unit, text = column_format("time", [value for value in values if value is not None], "s")
    cells = tuple("-" if value is None else text(value) for value in values)
    return Column(heading=heading, unit=unit, cells=cells)


def _exposed(cases: Sequence[Case]) -> Column:
    """Return the column of exposed communication, with the range of both methods."""
    found = [[value for name in EXPOSED if (value := case.value(name)) is not None] for case in cases]
    _, unit, text = column_format("time", [max(values, default=0.0) for values in found], "s")
    cells = []
    for values in found:
        ends = dict.fromkeys(text(max(0.0, value)) for value in sorted(values))
        cells.append(" to ".join(ends) or "-")
    return Column(heading="exposed", unit=unit, cells=tuple(cells))


def _reference(cases: Sequence[Case], metric: str) -> list[Column]:
    """Return the column of the times that a speedup compares with, unless all are times of the table."""
    other = [case.compared_with(metric) for case in cases]
    seconds = [None if found is None else found[0] for found in other]
    if not any(seconds):
        return []
    column = _seconds("", seconds)
    if metric == "speedup":
        name = "1 GPU" if "GPUs" in cases[0].properties else "1 rank"
    elif set(column.cells) - {"-"} <= set(_times(cases)[0].cells):
        return []
    else:
        name = find_or_plain(metric).heading.removeprefix("speedup over ")
    return [replace(column, heading=name)]


def _metric(cases: Sequence[Case], name: str) -> Column:
    stored = [case.metrics[name] for case in cases if name in case.metrics]
    values = [metric["value"] for metric in stored]
    heading, unit, text = column_format(name, values, stored[0]["unit"])
    cells = [_cell(case, name, unit, text) for case in cases]
    return Column(heading=heading, unit=unit, cells=tuple(cells))


def _cell(case: Case, name: str, unit: str, text: Callable[[float], str]) -> str:
    """Return a metric's value as text, with the ends of its interval if they are stored."""
    if (value := case.value(name)) is None:
        return "-"
    if (other := case.compared_with(name)) is not None:
        if not math.isfinite(error := value * other[1]):
            return text(value)
        is_1 = abs(value - 1) <= error and name != "speedup"
        return f"none shown ± {error:.2f}" if is_1 else f"{text(value)} ± {error:.2f}"
    interval = case.interval(name)
    if interval is None or interval == (value, value):
        return text(value)
    low, high = interval
    if unit and not 0 < low <= high < NO_USE * low:
        return "no usable fit"
    return f"{text(value)} ({text(low)} to {text(high)})"
