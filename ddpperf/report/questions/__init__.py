"""The tables that a report on data-parallel training asks for, in Markdown, from a stored run.

Each question has grids, and some a sentence that is computed from their figures. The last section
lists the questions that the run did not measure, with the commands that measure them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ddpperf.report.questions.figures import is_synthetic
from ddpperf.report.questions.grid import WIDTH, grid_lines
from ddpperf.report.questions.question import read_questions
from ddpperf.report.stored_cases import cases_of
from ddpperf.report.terminal_tables import wrapped
from ddpperf.results.stored_runs import is_ab_run
from ddpperf.results.units import counted

SYNTHETIC = (
    "Synthetic images: accuracies mean nothing, so none are shown. Pass --data cifar10 or imagefolder:DIR."
)
INCOMPLETE = {"failed": "failed", "not run": "did not run"}  # kinds of outcomes


def report_tables(document: Mapping[str, Any]) -> str:
    """Return all tables of a stored run as Markdown; of an A/B run, those of the candidate."""
    cases = cases_of(document)
    kinds = Counter(outcome["kind"] for outcome in document["ddpperf"]["outcomes"].values())
    incomplete = [
        f"{counted(kinds[kind], 'test')} {what}" for kind, what in INCOMPLETE.items() if kinds[kind]
    ]
    parts = [f"Of this run, {' and '.join(incomplete)}, so figures are missing.", ""] * bool(incomplete)
    parts += ["The figures of this A/B run are those of the candidate.", ""] * is_ab_run(document["ddpperf"])
    parts += [SYNTHETIC, ""] * any(map(is_synthetic, cases))
    missing: list[str] = []
    numbers: dict[str, int] = {}  # of warnings, by their texts
    answering: set[str] = set()
    for question in read_questions():
        if found := question.answered_by(cases):
            answering |= {row.case.test for row in found}
            about = question.sentence
            text = question.text if about is None else about([row.case for row in found])
            sentence = wrapped(text, WIDTH, indent=0)
            parts += [f"## {question.title}", "", *grid_lines(found, question, numbers)]
            parts += [*sentence, ""] if any(sentence) else []
        else:
            missing += wrapped(f"- {question.title}: `{question.command}`", WIDTH)
    if missing:
        parts += ["## Not measured in this run", "", *missing, ""]
    if others := len(cases) - len(answering):
        more = counted(others, "more test")
        parts += [f"{more} of this run: python -m ddpperf.report RUN.json shows them.", ""]
    return "\n".join(parts)
