"""Computation, communication, bandwidth and messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpperf.analysis.cost_models import REPORT_FORMULAS, ReportFormula
from ddpperf.report.questions.grid import (
    EACH_CASE,
    Figure,
    Shape,
    figure,
    time_of,
)
from ddpperf.report.questions.question import Question, training_of
from ddpperf.report.stored_cases import Case
from ddpperf.results import units
from ddpperf.results.metrics import MESSAGE_KINDS
from ddpperf.specs import DATA_PARALLEL_PARTS, AllReduceSpec

SENT = ("gradient_busbw_bytes_per_second", "communicated_bytes_per_epoch")


COMMUNICATION = Question(
    title="Q3: computation and communication in an epoch",
    tests=("test_comm_split", "test_data_parallel_split"),
    file="test_comm_split.py",
    needs=("exposed_comm_seconds",),
    grid=Shape(
        figures=(
            figure("compute_seconds", per_epoch=True),
            figure("traced_comm_seconds", "communication", per_epoch=True),
            figure("traced_exposed_comm_seconds", "exposed", per_epoch=True),
            figure("exposed_comm_seconds", "exposed (difference)", per_epoch=True),
        )
    ),
)


def _over_ddp(case: Case) -> str:
    """Return DataParallel's communication over DDP's; older runs divided by the time of a rank that waits."""
    known, over = case.value("ddp_comm_without_waiting_seconds"), case.value("comm_over_ddp")
    return units.factor(over) if known and over else ""


DATA_PARALLEL = Question(
    title="Q3: communication of DataParallel compared with DDP's, in an epoch",
    tests=("test_data_parallel_split",),
    file="test_comm_split.py",
    needs=("replicate_seconds",),
    grid=Shape(
        figures=(
            *(figure(f"{part}_seconds", per_epoch=True) for part in DATA_PARALLEL_PARTS),
            figure("traced_comm_seconds", "all", per_epoch=True),
            figure("ddp_comm_without_waiting_seconds", "DDP's", per_epoch=True),
            Figure(heading="over DDP's", text=_over_ddp),
        )
    ),
)


def _sent_at(formula: ReportFormula) -> Figure:
    """Return the bandwidth of the gradients by a formula of the reports."""

    def text(case: Case) -> str:
        spec, (busbw, gradients) = training_of(case), (case.metrics[name]["value"] for name in SENT)
        N, S = spec.world_size, gradients / spec.steps_per_epoch
        sending = 2 * (N - 1) / N * S / busbw  # seconds, by the definition of the bus bandwidth
        return units.bandwidth(formula.seconds(N, S, 1.0) / sending)

    return Figure(heading=f"B by {formula.formula}", text=text)


BANDWIDTH = Question(
    title="Q3: bandwidth while training",
    tests=("test_comm_split",),
    file="test_comm_split.py",
    needs=SENT,
    grid=Shape(
        figures=(figure(SENT[0], "busbw"), figure("link_utilization"), *map(_sent_at, REPORT_FORMULAS))
    ),
)


def _predicted(formula: ReportFormula) -> Figure:
    """Return the time of an all_reduce by a formula of the reports, and this time over the measured one."""

    def text(case: Case) -> str:
        N, link = case.measured.spec.world_size, case.link_bytes_per_second
        seconds = formula.seconds(N, _nbytes(case), link or math.inf)
        return f"{units.seconds(seconds)} ({units.factor(seconds / case.seconds)})"

    return Figure(heading=formula.formula, text=text)


def _of_the_library(case: Case) -> bool:
    spec = case.measured.spec
    return isinstance(spec, AllReduceSpec) and spec.algorithm == "backend" and spec.in_place


def _about_formulas(cases: Sequence[Case]) -> str:
    """Relate the formulas to each other and to the link utilization of the largest all_reduce."""
    case = max(cases, key=lambda case: (case.measured.spec.world_size, _nbytes(case)))
    N = case.measured.spec.world_size
    ring, doubling, aggregate = (formula.seconds(N, 1.0, 1.0) for formula in REPORT_FORMULAS)
    return (
        f"Bytes are divided by the rate of the link, {units.bandwidth(case.link_bytes_per_second or 0.0)}. "
        "For 2 (N-1) S / N, predicted over measured is the link utilization: "
        f"{units.percent(case.value('link_utilization') or 0.0)} with {case.described()} and "
        f"{case.properties['buffer']}. There, (S / B) log2 N is {doubling / ring:.2f} times as long, and "
        f"2 (N-1) S is {aggregate / ring:.0f} times as long, because it adds up the times of links "
        "that send at the same time. No formula includes latency, so all times are too short for small "
        "buffers."
    )


def _nbytes(case: Case) -> int:
    assert isinstance(case.measured.spec, AllReduceSpec)
    return case.measured.spec.nbytes


FORMULAS = Question(
    title="Q3: formulas of reports compared with the measured all_reduce",
    tests=("test_all_reduce",),
    file="test_all_reduce.py",
    needs=("link_utilization",),
    chosen=_of_the_library,
    grid=Shape(rows=EACH_CASE, groups=(), figures=(time_of("measured"), *map(_predicted, REPORT_FORMULAS))),
    sentence=_about_formulas,
)


NODES = Question(
    title="Q3: links inside and between nodes",
    tests=("test_cost_model", "test_backend_model"),
    file="test_all_reduce.py --nodes 2",
    needs=("between_bytes_per_second",),
    grid=Shape(
        rows=EACH_CASE,
        groups=(),
        figures=(
            figure("inside_message_seconds"),
            figure("inside_bytes_per_second"),
            figure("between_message_seconds"),
            figure("between_latency_seconds"),
            figure("between_bytes_per_second"),
        ),
    ),
)


def _messages(kind: str) -> Figure:
    """Return the column of the bytes and the number of a kind of messages."""

    def text(case: Case) -> str:
        if not (nbytes := case.value(f"{kind}_bytes")):
            return ""
        return f"{units.nbytes(nbytes)} in {int(case.value(f'{kind}_messages') or 0)}"

    return Figure(heading=kind, text=text)


def _about_messages(cases: Sequence[Case]) -> str:
    for case in cases:
        if case.properties["strategy"] == "ddp":
            sent = {kind: case.value(f"{kind}_bytes") or 0.0 for kind in MESSAGE_KINDS}
            others = 1 - sent["gradients"] / sum(sent.values())
            return f"In a step of DDP, {others:.2%} of the bytes are not gradients."
    return "Plain DDP was not measured."


MESSAGES = Question(
    title="Q6 and Q7: messages besides gradients",
    tests=("test_messages",),
    file="test_messages.py",
    needs=("gradients_bytes",),
    grid=Shape(
        rows=("strategy",),
        figures=(*map(_messages, MESSAGE_KINDS), figure("start_initial_state_bytes")),
    ),
    sentence=_about_messages,
)
