"""The tables that a report on data-parallel training asks for, in Markdown, from a stored run.

Each question has a table and one sentence that is computed from its figures. A question that the run
did not measure names the command that measures it. The first columns of a table are the devices,
the batch size, and what else distinguishes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpperf.report.cases import cases_of
from ddpperf.report.questions.accuracy import ACCURACY, SET_EPOCH
from ddpperf.report.questions.communication import BANDWIDTH, COMMUNICATION, DATA_PARALLEL, FORMULAS, MESSAGES
from ddpperf.report.questions.costs import EPOCH_COST, TRAINING_COST
from ddpperf.report.questions.laws import LAWS
from ddpperf.report.questions.parts import PARTS_SPEEDUP, STEP_PARTS
from ddpperf.report.questions.precision import PRECISION, PRECISION_ACCURACY
from ddpperf.report.questions.question import Question, answering, table_rows
from ddpperf.report.questions.scaling import BATCH_SIZE, ONE_DEVICE_ENOUGH, SCALING
from ddpperf.report.questions.usage import USAGE
from ddpperf.report.text import markdown_table

QUESTIONS: tuple[Question, ...] = (
    *(BATCH_SIZE, SCALING, COMMUNICATION, DATA_PARALLEL, BANDWIDTH, FORMULAS, ACCURACY),
    *(PRECISION, PRECISION_ACCURACY, SET_EPOCH, MESSAGES, STEP_PARTS, PARTS_SPEEDUP, LAWS),
    *(EPOCH_COST, TRAINING_COST, ONE_DEVICE_ENOUGH, USAGE),
)


def report_tables(document: Mapping[str, Any]) -> str:
    """Return all tables of a stored run as Markdown; of an A/B run, those of the candidate."""
    cases = cases_of(document)
    parts = []
    for question in QUESTIONS:
        parts += [f"## {question.title}", ""]
        if found := answering(cases, question):
            headings, *rows = table_rows(found, question)
            parts += [*markdown_table(headings, rows), "", question.sentence(found), ""]
        else:
            parts += [f"Not measured in this run: `python -m pytest perf/{question.file}`.", ""]
    return "\n".join(parts)
