"""Computation, communication, bandwidth and messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpperf.analysis.cost_models import REPORT_FORMULAS
from ddpperf.report.questions.question import Cells, Question, distinguishing, training_of
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
    metrics=(
        *("compute_seconds", "traced_comm_seconds"),
        *("traced_exposed_comm_seconds", "exposed_comm_seconds"),
    ),
    per_epoch=True,
)


DATA_PARALLEL = Question(
    title="Q3: communication of DataParallel compared with DDP's, in an epoch",
    tests=("test_data_parallel_split",),
    file="test_comm_split.py",
    needs=("replicate_seconds",),
    metrics=(
        *(f"{part}_seconds" for part in DATA_PARALLEL_PARTS),
        *("traced_comm_seconds", "traced_exposed_comm_seconds", "idle_in_comm_seconds"),
        *("ddp_traced_comm_seconds", "ddp_traced_exposed_comm_seconds"),
    ),
    per_epoch=True,
)


def _sent_at(case: Case) -> Cells:
    spec, (busbw, gradients) = training_of(case), (case.metrics[name]["value"] for name in SENT)
    N, S = spec.world_size, gradients / spec.steps_per_epoch
    sending = 2 * (N - 1) / N * S / busbw  # seconds, by the definition of the bus bandwidth
    return {
        formula.formula: units.bandwidth(formula.seconds(N, S, 1.0) / sending) for formula in REPORT_FORMULAS
    }


BANDWIDTH = Question(
    title="Q3: bandwidth while training",
    tests=("test_comm_split",),
    file="test_comm_split.py",
    needs=SENT,
    cells=_sent_at,
    metrics=("gradient_busbw_bytes_per_second", "link_utilization"),
)


def _formulas(cases: Sequence[Case]) -> list[Cells]:
    """Return a row for each formula and each in-place all_reduce of the library."""
    chosen = _of_the_library(cases)
    rows: list[Cells] = []
    for described, case in zip(distinguishing(chosen), chosen, strict=True):
        for formula in REPORT_FORMULAS:
            N, link = case.measured.spec.world_size, case.link_bytes_per_second
            seconds = formula.seconds(N, _nbytes(case), link or math.inf)
            cells = {
                "formula": formula.formula,
                "what it counts": formula.counts,
                "predicted": units.seconds(seconds),
                "measured": units.seconds(case.seconds),
                "predicted over measured": f"{seconds / case.seconds:.3g}",
            }
            rows.append({**described, **cells})
    return rows


def _of_the_library(cases: Sequence[Case]) -> list[Case]:
    return [
        case
        for case in cases
        if isinstance(spec := case.measured.spec, AllReduceSpec)
        and spec.algorithm == "backend"
        and spec.in_place
    ]


def _about_formulas(cases: Sequence[Case]) -> str:
    """Relate the formulas to each other and to the link utilization of the largest all_reduce."""
    chosen = _of_the_library(cases)
    if not chosen:
        return "No all_reduce of NCCL or gloo was measured."
    case = max(chosen, key=lambda case: (case.measured.spec.world_size, _nbytes(case)))
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
    rows=_formulas,
    sentence=_about_formulas,
)


NODES = Question(
    title="Q3: links inside and between nodes",
    tests=("test_cost_model", "test_backend_model"),
    file="test_all_reduce.py --nodes 2",
    needs=("between_bytes_per_second",),
    metrics=(
        *("inside_message_seconds", "inside_bytes_per_second"),
        *("between_message_seconds", "between_latency_seconds", "between_bytes_per_second"),
    ),
)


def _messages(case: Case) -> Cells:
    cells = {}
    for kind in MESSAGE_KINDS:
        if nbytes := case.value(f"{kind}_bytes"):
            count = units.counted(int(case.value(f"{kind}_messages") or 0), "message")
            cells[kind] = f"{units.nbytes(nbytes)} in {count}"
    return cells


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
    cells=_messages,
    metrics=("start_initial_state_bytes",),
    sentence=_about_messages,
)
