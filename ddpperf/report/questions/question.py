"""A question of a report, and functions with which all questions make their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpperf.report.questions.grid import WIDTH, Numbers, Shape, grid_lines
from ddpperf.report.stored_cases import Case, of_functions
from ddpperf.report.terminal_tables import wrapped
from ddpperf.specs import TrainingSpec


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of a report.

    tests: the test functions that answer it. needs: the metrics without which a test, such as one that
    failed early, answers nothing. chosen: whether a case of these tests is shown. file: the file of the
    tests, with the options that they need. sentence: returns what no figure says.
    """

    title: str
    tests: tuple[str, ...]
    needs: tuple[str, ...]
    file: str
    grid: Shape
    chosen: Callable[[Case], bool] = lambda case: True
    sentence: Callable[[Sequence[Case]], str] | None = None


def answer(cases: Sequence[Case], question: Question, numbers: Numbers) -> list[str]:
    """Return the lines that answer a question, in Markdown; nothing if no case has figures for it.

    numbers: the numbers of the warnings so far, to which this adds.
    """
    found = [
        case
        for case in of_functions(cases, *question.tests)
        if question.chosen(case) and all(metric in case.metrics for metric in question.needs)
    ]
    if not found:
        return []
    sentence = question.sentence(found) if question.sentence is not None else ""
    ending = [*wrapped(sentence, WIDTH, indent=0), ""] if sentence else []
    return [*grid_lines(found, question.grid, numbers), *ending]


def training_of(case: Case) -> TrainingSpec:
    assert isinstance(case.measured.spec, TrainingSpec)
    return case.measured.spec
