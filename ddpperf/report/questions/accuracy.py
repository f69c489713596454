"""Accuracy of whole trainings, mixed precision, and the sampler's set_epoch."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.report.experiment_columns import SAMPLER, WHOLE_TRAININGS
from ddpperf.report.questions.question import Question, metric_cells, time_cell
from ddpperf.report.stored_cases import Case
from ddpperf.results import units

COMPARED = {
    "accuracy_over_baseline": "the small batch",
    "accuracy_over_as_it_is": "as it is",
    "accuracy_over_fp32": "fp32",
}
SPEED = ("images_per_second", "speedup_over_fp32", "speedup_over_tf32")


def accuracies(case: Case) -> dict[str, str]:
    """Return by heading the accuracies of a training, their differences, and what course reports state."""
    cells = metric_cells(case, ("train_accuracy", "test_accuracy"))
    if ends := case.interval("test_accuracy"):
        cells["95% interval"] = "{:.1%} to {:.1%}".format(*ends)
    for metric, other in COMPARED.items():
        if (difference := case.value(metric)) is not None:
            cells[f"points over {other}"] = units.points(difference)
            if ends := case.interval(metric):
                cells[f"points over {other}"] += f" ({' to '.join(map(units.points, ends))})"
    return cells | metric_cells(case, [name for name in case.metrics if name.startswith("reported_")])


ACCURACY = Question(
    title="Q4: accuracy with a large batch",
    tests=WHOLE_TRAININGS,
    file="test_large_batch.py",
    needs=("train_accuracy",),
    cells=accuracies,
    metrics=("mirrored_test_accuracy",),
)


SET_EPOCH = Question(
    title="Q5: with and without set_epoch",
    tests=("test_shards_are_disjoint_and_cover_the_data", "test_without_set_epoch_the_epochs_repeat"),
    file="test_sampler.py",
    needs=("repeated_places",),
    metrics=SAMPLER,
)


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


PRECISION_ACCURACY = Question(
    title="Mixed precision: accuracy",
    tests=("test_precision_accuracy",),
    file="test_precision.py",
    needs=("train_accuracy",),
    cells=lambda case: time_cell(case) | accuracies(case),
    metrics=(*SPEED, "skipped_steps"),
)
