"""Accuracy of whole trainings, and the sampler's set_epoch."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.report.questions.question import Question, extreme, metric_cells, training_of
from ddpperf.report.stored_cases import Case, of_functions
from ddpperf.report.table_columns import SAMPLER, WHOLE_TRAININGS
from ddpperf.results import units

COMPARED = {
    "accuracy_over_baseline": "the small batch",
    "accuracy_over_as_it_is": "as it is",
    "accuracy_over_fp32": "fp32",
}


def accuracies(case: Case) -> dict[str, str]:
    """Return the accuracies of a whole training by heading, their differences, and those of reports."""
    cells = metric_cells(case, ("train_accuracy", "test_accuracy"))
    if ends := case.interval("test_accuracy"):
        cells["95% interval"] = "{:.1%} to {:.1%}".format(*ends)
    for metric, other in COMPARED.items():
        if (difference := case.value(metric)) is not None:
            cells[f"points over {other}"] = units.points(difference)
    for metric in ("train_accuracy", "test_accuracy"):
        if stated := [f"{report}: {units.percent(value)}" for report, value in case.reported(metric).items()]:
            cells[f"{metric.replace('_', ' ')} in reports"] = ", ".join(stated)
    return cells


def _about_accuracy(cases: Sequence[Case]) -> str:
    """Compare the best training with the largest batch and the first one with the smallest batch."""
    compared = of_functions(cases, "test_large_batch", "test_remedies")
    trained = [case for case in compared if "train_accuracy" in case.metrics]
    sizes = {case.test: training_of(case).global_batch_size for case in trained}
    if len(set(sizes.values())) < 2:
        return "Only one batch size was trained, so nothing is compared."
    small = next(case for case in trained if sizes[case.test] == min(sizes.values()))
    epochs = small.properties["epochs"]
    large = [
        case
        for case in trained
        if sizes[case.test] == max(sizes.values()) and case.properties["epochs"] == epochs
    ]
    if not large:
        return "The large and the small batch were trained for different numbers of epochs."
    (before, _), (after, best) = (
        extreme([small], "train_accuracy", most=True),
        extreme(large, "train_accuracy", most=True),
    )
    return (
        f"After {epochs} epochs, the small batch has a training accuracy of {before:.1%} "
        f"({small.described()}), and the best large batch has {after:.1%} ({best.described()}): "
        f"{units.points(after - before)} points."
    )


ACCURACY = Question(
    title="Q4: accuracy with a large batch",
    tests=WHOLE_TRAININGS,
    file="test_large_batch.py",
    needs=("train_accuracy",),
    cells=accuracies,
    metrics=("mirrored_test_accuracy",),
    sentence=_about_accuracy,
)


SET_EPOCH = Question(
    title="Q5: with and without set_epoch",
    tests=("test_shards_are_disjoint_and_cover_the_data", "test_without_set_epoch_the_epochs_repeat"),
    file="test_sampler.py",
    needs=("repeated_places",),
    metrics=SAMPLER,
)
