"""Accuracy of whole trainings, and the sampler's set_epoch."""

from __future__ import annotations

from collections.abc import Sequence

from ddpperf.report.experiments import WHOLE_TRAININGS
from ddpperf.report.questions.question import (
    Cells,
    Question,
    extreme,
    metric_cells,
    row_per_case,
    training_of,
)
from ddpperf.report.stored_cases import Case, of_functions
from ddpperf.results import units
from ddpperf.specs import SamplerSpec


def accuracies(case: Case) -> dict[str, str]:
    """Return the accuracies of a whole training by heading, and those that reports state."""
    cells = metric_cells(
        case,
        {
            "training accuracy": ("train_accuracy", units.percent),
            "test accuracy": ("test_accuracy", units.percent),
        },
    )
    if ends := case.interval("test_accuracy"):
        cells["95% interval"] = "{:.1%} to {:.1%}".format(*ends)
    cells |= metric_cells(
        case,
        {
            "mirrored test accuracy": ("mirrored_test_accuracy", units.percent),
            "points over the small batch": ("accuracy_over_baseline", units.points),
            "points over as it is": ("accuracy_over_as_it_is", units.points),
        },
    )
    for metric, heading in (("train_accuracy", "training accuracy"), ("test_accuracy", "test accuracy")):
        if stated := [f"{report}: {units.percent(value)}" for report, value in case.reported(metric).items()]:
            cells[f"{heading} in reports"] = ", ".join(stated)
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
    rows=row_per_case(accuracies),
    sentence=_about_accuracy,
)


def _sampled(case: Case) -> Cells:
    assert isinstance(case.measured.spec, SamplerSpec)
    return {"set_epoch": "called" if case.measured.spec.set_epoch else "not called"} | metric_cells(
        case,
        {
            "missing images": ("missing_images", units.whole),
            "repeated images": ("repeated_images", units.whole),
            "same place next epoch": ("repeated_places", units.percent),
        },
    )


def _about_set_epoch(cases: Sequence[Case]) -> str:
    parts = {
        called: [case for case in cases if case.measured.spec.set_epoch is called] for called in (True, False)
    }
    if not all(parts.values()):
        return ""
    with_it, without = (extreme(parts[called], "repeated_places", most=called)[0] for called in (True, False))
    return (
        f"Without set_epoch, {units.percent(without)} of the images keep their place in the next epoch. "
        f"With set_epoch, at most {units.percent(with_it)} do."
    )


SET_EPOCH = Question(
    title="Q5: with and without set_epoch",
    tests=("test_shards_are_disjoint_and_cover_the_data", "test_without_set_epoch_the_epochs_repeat"),
    file="test_sampler.py",
    needs=("repeated_places",),
    rows=row_per_case(_sampled),
    sentence=_about_set_epoch,
)
