"""A question of a report, and functions with which all questions make their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddpperf.report.stored_cases import Case, of_functions
from ddpperf.report.tables import distinguished
from ddpperf.results import units
from ddpperf.results.metrics import find
from ddpperf.specs import TrainingSpec

# properties with a column even if they do not vary
ALWAYS = ("GPUs", "ranks", "batch", "global batch", "buffer", "order")
NOTHING = "-"
Cells = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a report.

    tests: the test functions that answer it. needs: the metrics without which a test, such as one that
    failed early, answers nothing. file: the file of the tests, with the options that they need.
    sentence: returns what no figure of the table says.

    The table has a row for each case. cells: returns texts of a case by heading. metrics: the metrics
    in the columns after them. per_epoch: whether the metrics, which are of one step, are multiplied by
    the steps of an epoch. rows: returns all rows of a table that has no row for each case.
    """

    title: str
    tests: tuple[str, ...]
    needs: tuple[str, ...]
    file: str
    sentence: Callable[[Sequence[Case]], str] | None = None
    cells: Callable[[Case], Cells] | None = None
    metrics: tuple[str, ...] = ()
    per_epoch: bool = False
    rows: Callable[[Sequence[Case]], Sequence[Cells]] | None = None


def answer(cases: Sequence[Case], question: Question) -> tuple[list[list[str]], str] | None:
    """Return the rows of a question's table, the headings first, and its sentence, or "".

    Returns None if no case has figures for the question.
    """
    found = [
        case
        for case in of_functions(cases, *question.tests)
        if all(metric in case.metrics for metric in question.needs)
    ]
    if not found:
        return None
    rows = question.rows(found) if question.rows is not None else _row_per_case(found, question)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [[row.get(heading, NOTHING) for heading in headings] for row in rows]
    return [headings, *cells], question.sentence(found) if question.sentence is not None else ""


def _row_per_case(cases: Sequence[Case], question: Question) -> list[Cells]:
    """Return a row for each case: what distinguishes it, and its figures."""
    rows: list[Cells] = []
    for properties, case in zip(distinguishing(cases), cases, strict=True):
        steps = training_of(case).steps_per_epoch if question.per_epoch else 1
        figures = metric_cells(case, question.metrics, scale=steps)
        cells = question.cells(case) if question.cells else {}
        rows.append({**properties, **cells, **figures})
    return rows


def distinguishing(cases: Sequence[Case]) -> list[Cells]:
    """Return the properties that distinguish the cases, and those that always have a column."""
    _, varying = distinguished(cases)
    names = [name for name in ALWAYS if any(case.properties.get(name) for case in cases)]
    columns = {name: [case.properties.get(name) or NOTHING for case in cases] for name in names}
    columns |= {column.heading or "kind": list(column.cells) for column in varying}
    return [{name: cells[place] for name, cells in columns.items()} for place in range(len(cases))]


def metric_cells(case: Case, names: Sequence[str], *, scale: float = 1.0) -> dict[str, str]:
    """Return the values of the given metrics as text by heading, without metrics that the case lacks."""
    values = {find(name): case.value(name) for name in names}
    return {
        metric.heading: metric.format(scale * value) for metric, value in values.items() if value is not None
    }


def time_cell(case: Case) -> dict[str, str]:
    """Return the time of a case by its heading, such as step, epoch or training."""
    return {case.timed_work: units.seconds(case.seconds)}


def training_of(case: Case) -> TrainingSpec:
    assert isinstance(case.measured.spec, TrainingSpec)
    return case.measured.spec


def markdown_table(headings: Sequence[str], *rows: Sequence[str]) -> list[str]:
    head, *body = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return [head, "|---" * len(headings) + "|", *body]
