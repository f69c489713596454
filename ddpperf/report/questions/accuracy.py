"""Accuracy of whole trainings, mixed precision, and the sampler's set_epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpperf.report.experiment_columns import SAMPLER, WHOLE_TRAININGS
from ddpperf.report.questions.grid import EACH_CASE, Figure, Shape, figure, time_of
from ddpperf.report.questions.question import Question
from ddpperf.report.stored_cases import Case
from ddpperf.results import units
from ddpperf.results.metrics import find

COMPARED = {
    "accuracy_over_baseline": "points over the small batch",
    "accuracy_over_as_it_is": "points over as it is",
    "accuracy_over_fp32": "points over fp32",
}
STATED = ("train_accuracy_A", "train_accuracy_B", "test_accuracy_C", "test_accuracy_D")  # by course reports
SYNTHETIC = (
    "Synthetic images: accuracies mean nothing, so none are shown. Pass --data cifar10 or imagefolder:DIR."
)


def _with_interval(name: str, heading: str, text: Callable[[float], str]) -> Figure:
    """Return the column of a metric with its 95% interval, without its value for synthetic images."""

    def cell(case: Case) -> str:
        if (value := case.value(name)) is None or is_synthetic(case):
            return ""
        ends = case.interval(name)
        return f"{text(value)} ({' to '.join(map(text, ends))})" if ends else text(value)

    return Figure(heading=heading, text=cell)


def is_synthetic(case: Case) -> bool:
    return getattr(case.measured.spec, "data", "") == "synthetic"


ACCURACIES = (
    *(_with_interval(name, find(name).heading, find(name).format) for name in ("train_loss", "test_loss")),
    *(
        _with_interval(name, find(name).heading, units.percent)
        for name in ("train_accuracy", "test_accuracy", "best_test_accuracy", "mirrored_test_accuracy")
    ),
    *(_with_interval(name, heading, units.points) for name, heading in COMPARED.items()),
    *(
        _with_interval(f"reported_{name}", f"report {name[-1]}'s {find(name[:-2]).heading}", units.percent)
        for name in STATED
    ),
)


def _about_accuracies(cases: Sequence[Case]) -> str:
    return SYNTHETIC if any(map(is_synthetic, cases)) else ""


ACCURACY = Question(
    title="Q4: accuracy with a large batch",
    tests=WHOLE_TRAININGS,
    file="test_large_batch.py --data cifar10",
    needs=("train_accuracy",),
    grid=Shape(rows=EACH_CASE, groups=(), figures=(time_of("training"), *ACCURACIES)),
    sentence=_about_accuracies,
)


SET_EPOCH = Question(
    title="Q5: with and without set_epoch",
    tests=("test_shards_are_disjoint_and_cover_the_data", "test_without_set_epoch_the_epochs_repeat"),
    file="test_sampler.py",
    needs=("repeated_places",),
    grid=Shape(rows=EACH_CASE, groups=(), figures=tuple(map(figure, SAMPLER))),
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
    grid=Shape(
        rows=("precision",),
        figures=(
            time_of("step"),
            figure("images_per_second"),
            figure("speedup_over_fp32"),
            figure("speedup_over_tf32"),
            figure("loss_after_5_steps", "loss"),
        ),
    ),
    sentence=_about_precision,
)


PRECISION_ACCURACY = Question(
    title="Mixed precision: accuracy",
    tests=("test_precision_accuracy",),
    file="test_precision.py --data cifar10",
    needs=("train_accuracy",),
    grid=Shape(
        rows=EACH_CASE, groups=(), figures=(time_of("training"), *ACCURACIES, figure("skipped_steps"))
    ),
    sentence=_about_accuracies,
)
