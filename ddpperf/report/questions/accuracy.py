"""Accuracy of whole trainings, and the sampler's set_epoch."""

from __future__ import annotations

from ddpperf.report.questions.question import Question, metric_cells
from ddpperf.report.stored_cases import Case
from ddpperf.report.table_columns import SAMPLER, WHOLE_TRAININGS
from ddpperf.results import units

COMPARED = {
    "accuracy_over_baseline": "the small batch",
    "accuracy_over_as_it_is": "as it is",
    "accuracy_over_fp32": "fp32",
}


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
    for metric in ("train_accuracy", "test_accuracy"):
        if stated := [f"{report}: {units.percent(value)}" for report, value in case.reported(metric).items()]:
            cells[f"{metric.replace('_', ' ')} in reports"] = ", ".join(stated)
    return cells


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
