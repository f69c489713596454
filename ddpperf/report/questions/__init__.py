"""The tables that a report on data-parallel training asks for, in Markdown, from a stored run.

Each question has a table, and some a sentence that is computed from its figures. The last section
lists the questions that the run did not measure, with the commands that measure them. The first columns
of a table are the devices, the batch size, and what else distinguishes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpperf.report.questions.accuracy import ACCURACY, PRECISION, PRECISION_ACCURACY, SET_EPOCH
from ddpperf.report.questions.communication import (
    BANDWIDTH,
    COMMUNICATION,
    DATA_PARALLEL,
    FORMULAS,
    MESSAGES,
    NODES,
)
from ddpperf.report.questions.costs import EPOCH_COST, TRAINING_COST, USAGE
from ddpperf.report.questions.grid import WIDTH
from ddpperf.report.questions.laws import LAWS
from ddpperf.report.questions.question import Question, answer
from ddpperf.report.questions.speedup import (
    BATCH_SIZE,
    EPOCH_PARTS,
    ONE_DEVICE_ENOUGH,
    PARTS_SPEEDUP,
    STEP_PARTS,
    STRONG_SCALING,
    WEAK_SCALING,
)
from ddpperf.report.stored_cases import cases_of
from ddpperf.report.terminal_tables import wrapped

QUESTIONS: tuple[Question, ...] = (
    *(
        BATCH_SIZE,
        WEAK_SCALING,
        STRONG_SCALING,
        COMMUNICATION,
        DATA_PARALLEL,
        BANDWIDTH,
        FORMULAS,
        NODES,
        ACCURACY,
    ),
    *(PRECISION, PRECISION_ACCURACY, SET_EPOCH, MESSAGES, STEP_PARTS, EPOCH_PARTS, PARTS_SPEEDUP, LAWS),
    *(EPOCH_COST, TRAINING_COST, ONE_DEVICE_ENOUGH, USAGE),
)


def report_tables(document: Mapping[str, Any]) -> str:
    """Return all tables of a stored run as Markdown; of an A/B run, those of the candidate."""
    cases = cases_of(document)
    parts: list[str] = []
    missing: list[str] = []
    numbers: dict[str, int] = {}  # of warnings, by their texts
    for question in QUESTIONS:
        if lines := answer(cases, question, numbers):
            parts += [f"## {question.title}", "", *lines]
        else:
            missing += wrapped(f"- {question.title}: `python -m pytest perf/{question.file}`", WIDTH)
    if missing:
        parts += ["## Not measured in this run", "", *missing, ""]
    return "\n".join(parts)
