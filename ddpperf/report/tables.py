"""A stored run as tables, one for each experiment.

What is the same in all rows of a table stands in its heading. The columns are what varies, the time,
its comparison, and the metrics of the experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ddpperf.report.experiment_columns import EXPERIMENTS
from ddpperf.report.round_warnings import spread
from ddpperf.report.stored_cases import Case, in_words, rows_of, usual_properties
from ddpperf.results.metrics import column as column_format
from ddpperf.results.metrics import find_or_plain
from ddpperf.results.outcomes import OutcomeKind
from ddpperf.results.stored_runs import is_ab_run

ONLY_WHERE_IT_VARIES = ("memory format",)  # properties that no heading names
COMPARISON_TEXTS = ("interval", "finding")  # headings of columns without numbers
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

    def first(self, count: int) -> Table:
        """Return this table with its first rows only."""

        def cut(columns: tuple[Column, ...]) -> tuple[Column, ...]:
            return tuple(replace(column, cells=column.cells[:count]) for column in columns)

        marks = self.marks[:count]
        shown = {number for numbers in marks for number in numbers}
        return replace(
            self,
            properties=cut(self.properties),
            figures=cut(self.figures),
            tests=self.tests[:count],
            marks=marks,
            warnings={number: text for number, text in self.warnings.items() if number in shown},
        )


def tables_of(document: Mapping[str, Any]) -> list[Table]:
    """Return a table for each experiment of a stored run, in the order of EXPERIMENTS; others follow.

    A warning has the same number in all tables.
    """
    known = dict.fromkeys(experiment.title for experiment in EXPERIMENTS.values())
    by_title: dict[str, list[Case]] = {title: [] for title in known}
    for case in rows_of(document):
        by_title.setdefault(case.experiment.title, []).append(case)
    numbers: dict[str, int] = {}
    return [_table(cases, numbers) for cases in by_title.values() if cases]


def _table(cases: Sequence[Case], numbers: dict[str, int]) -> Table:
    """Return the table of an experiment. Warnings without a number are added to `numbers`."""
    properties, distinct = distinguished(cases)
    usual = usual_properties(cases[0].header)
    common = [
        in_words(name, value)
        for name, value in properties.items()
        if usual.get(name) != value and name not in ONLY_WHERE_IT_VARIES
    ]
    figures = compared = _compared(cases)
    if not is_ab_run(cases[0].header):
        times, metrics = _times(cases), _metrics(cases)
        same = [column for column in metrics if len(cases) > 1 and len(set(column.cells)) == 1]
        common += [" ".join(filter(None, (column.heading, column.cells[0], column.unit))) for column in same]
        metrics = [column for column in metrics if column not in same]
        time_last = cases[0].experiment.time_last
        figures = [*compared, *metrics, *times] if time_last else [*times, *compared, *metrics]
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
    rows = [case.properties for case in cases]
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value)
    usual = usual_properties(cases[0].header)
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
    if len({case.row["metric"] for case in cases if case.row}) > 1:
        found = tuple(case.row["metric"] if case.row else "-" for case in cases)
        columns.append(Column(heading="metric", cells=found, is_text=True))
    rows_differ = len(set(zip(*(column.cells for column in columns), strict=True))) == len(cases)
    if not rows_differ and len(cases) > 1:
        tests = tuple(case.test.rpartition("[")[-1].removesuffix("]") for case in cases)
        columns.insert(0, Column(heading="case", cells=tests, is_text=True))
    return common, tuple(columns)


def _times(cases: Sequence[Case]) -> list[Column]:
    if not any(case.experiment.timed for case in cases):
        return []
    seconds = [case.seconds for case in cases]
    heading, unit, text = column_format("time", seconds, "s")
    works = {case.timed_work for case in cases}
    heading = works.pop() if len(works) == 1 else heading
    times = Column(heading=heading, unit=unit, cells=tuple(map(text, seconds)))
    spreads = tuple("-" if (found := spread(case.measured)) is None else f"{found:.0%}" for case in cases)
    return [times] if set(spreads) == {"-"} else [times, Column(heading="IQR", cells=spreads)]


def _compared(cases: Sequence[Case]) -> list[Column]:
    """Return the columns that compare tests with the base or the stored run; none without a comparison."""
    if "judged" not in cases[0].header:
        return []
    rows = list(map(_texts, cases))
    names = ("finding", "ratio", "interval", *(("base", "candidate") if is_ab_run(cases[0].header) else ()))
    cells = {name: tuple(row.get(name, "-") for row in rows) for name in names}
    return [Column(heading=name, cells=of, is_text=name in COMPARISON_TEXTS) for name, of in cells.items()]


def _texts(case: Case) -> dict[str, str]:
    """Return the texts of a test's comparison by the headings of their columns."""
    if (row := case.row) is None:
        return {"finding": "new"} if case.test in case.header["judged"]["new"] else {}
    metric = find_or_plain(row["metric"])
    return {
        "ratio": "-" if row["base"] == 0 else f"{row['ratio']:.3f}",
        "interval": interval(row) or "-",
        "finding": finding(row),
        "base": metric.format(row["base"]),
        "candidate": metric.format(row["candidate"]),
    }


def _metrics(cases: Sequence[Case]) -> list[Column]:
    """Return a column for each metric that the experiment's table shows."""
    known = dict.fromkeys(name for case in cases for name in case.metrics)
    ends = {f"{name}_{end}" for name in known for end in ("low", "high")}
    patterns = dict.fromkeys(pattern for case in cases for pattern in case.experiment.metrics or case.metrics)
    names = [name for pattern in patterns for name in known if fnmatchcase(name, pattern)]
    columns = [_metric(cases, name) for name in dict.fromkeys(names) if name not in ends]
    if "optimizer_seconds" not in names:
        return columns
    after = names.index("optimizer_seconds") + 1  # the last part of a step
    return [*columns[:after], _other(cases), *columns[after:]]


def _other(cases: Sequence[Case]) -> Column:
    """Return the column of what is left of a step without its parts."""
    values = [case.other_seconds for case in cases]
    heading, unit, text = column_format("other_seconds", values, "s")
    return Column(heading=heading, unit=unit, cells=tuple(map(text, values)))


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
    interval = case.interval(name)
    if interval is None or interval == (value, value):
        return text(value)
    low, high = interval
    if unit and not 0 < low <= high < NO_USE * low:
        return "no usable fit"
    return f"{text(value)} ({text(low)} to {text(high)})"


def interval(row: Mapping[str, Any]) -> str:
    """Return the interval of a row's ratio as text; "" if it is not known."""
    if row["low"] is None or row["base"] == 0:
        return ""
    return f"{row['low']:.3f} or more" if row["high"] is None else f"{row['low']:.3f} to {row['high']:.3f}"


def finding(row: Mapping[str, Any]) -> str:
    """Return the finding of a row; `repeated` marks a repeated measurement."""
    repeated = "repeat" in row["stages"] and row["finding"] != "for information"
    return f"{row['finding']}{', repeated' * repeated}"
