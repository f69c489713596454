"""A question of a report, and functions with which all questions make their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddpperf.report.stored_cases import Case, of_functions
from ddpperf.report.tables import distinguished
from ddpperf.specs import TrainingSpec

# properties with a column even if they do not vary
ALWAYS = ("GPUs", "ranks", "batch", "global batch", "buffer")
NOTHING = "-"
Cells = Mapping[str, str]
Form = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a report.

    tests: the test functions that answer it. needs: the metrics without which a test, such as one that
    failed early, answers nothing. file: the file of the tests, with the options that they need. rows:
    returns the rows of the table, each with its texts by heading. sentence: returns a sentence on the
    cases that have figures.
    """

    title: str
    tests: tuple[str, ...]
    needs: tuple[str, ...]
    file: str
    rows: Callable[[Sequence[Case]], Sequence[Cells]]
    sentence: Callable[[Sequence[Case]], str]


def answering(cases: Sequence[Case], question: Question) -> list[Case]:
    """Return the cases that have figures for a question."""
    found = of_functions(cases, *question.tests)
    return [case for case in found if all(metric in case.metrics for metric in question.needs)]


def table_rows(cases: Sequence[Case], question: Question) -> list[list[str]]:
    """Return the rows of a question's table as text; the first row has the headings."""
    rows = question.rows(cases)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    return [headings, *([row.get(heading, NOTHING) for heading in headings] for row in rows)]


def row_per_case(figures: Callable[[Case], Cells]) -> Callable[[Sequence[Case]], list[Cells]]:
    """Return a function that returns a row for each case: what distinguishes it, and its figures."""

    def rows(cases: Sequence[Case]) -> list[Cells]:
        described = zip(distinguishing(cases), cases, strict=True)
        return [{**properties, **figures(case)} for properties, case in described]

    return rows


def distinguishing(cases: Sequence[Case]) -> list[Cells]:
    """Return the properties that distinguish the cases, and those that always have a column."""
    _, varying = distinguished(cases)
    names = [name for name in ALWAYS if any(case.properties.get(name) for case in cases)]
    columns = {name: [case.properties.get(name) or NOTHING for case in cases] for name in names}
    columns |= {column.heading or "kind": list(column.cells) for column in varying}
    return [{name: cells[place] for name, cells in columns.items()} for place in range(len(cases))]


def metric_cells(case: Case, metrics: Mapping[str, tuple[str, Form]], scale: float = 1.0) -> dict[str, str]:
    """Return the metrics that a case has, by heading. metrics: name and format by heading."""
    values = {heading: (case.value(name), form) for heading, (name, form) in metrics.items()}
    return {heading: form(scale * value) for heading, (value, form) in values.items() if value is not None}


def training_of(case: Case) -> TrainingSpec:
    assert isinstance(case.measured.spec, TrainingSpec)
    return case.measured.spec


def extreme(cases: Sequence[Case], metric: str, *, most: bool) -> tuple[float, Case]:
    """Return the largest or smallest value of a metric, and its case."""
    found = [(value, case) for case in cases if (value := case.value(metric)) is not None]
    return (max if most else min)(found, key=lambda pair: pair[0])
