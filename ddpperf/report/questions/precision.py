"""Speed and accuracy of mixed precision."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.report.questions.accuracy import accuracies
from ddpperf.report.questions.question import Cells, Question, time_cell
from ddpperf.report.stored_cases import Case

SPEED = ("images_per_second", "speedup_over_fp32", "speedup_over_tf32")


def _about_precision(cases: Sequence[Case]) -> str:
    """State the speedups of a 16-bit format over fp32 and tf32, which older runs did not store."""
    seconds: dict[str, dict[str, float]] = {}  # by batch size and precision, of the first case's training
    for case in cases:
        others = {"batch": "", "precision": ""}
        if {**case.properties, **others} == {**cases[0].properties, **others}:
            by_precision = seconds.setdefault(case.properties["batch"], {})
            by_precision[case.properties["precision"]] = case.seconds
    name = "fp16" if any("fp16" in found for found in seconds.values()) else "bf16"
    return " ".join(
        f"At batch {batch} {name} is {found[base] / found[name]:.2f} times as fast as {base}."
        for base in ("fp32", "tf32")
        for batch, found in seconds.items()
        if base in found and name in found
    )


PRECISION = Question(
    title="Mixed precision: time of a step",
    tests=("test_precision",),
    file="test_precision.py",
    needs=("images_per_second",),
    cells=time_cell,
    metrics=(*SPEED, "loss_after_5_steps"),
    sentence=_about_precision,
)


def _trained(case: Case) -> Cells:
    return time_cell(case) | accuracies(case)


PRECISION_ACCURACY = Question(
    title="Mixed precision: accuracy",
    tests=("test_precision_accuracy",),
    file="test_precision.py",
    needs=("train_accuracy",),
    cells=_trained,
    metrics=(*SPEED, "skipped_steps"),
)
