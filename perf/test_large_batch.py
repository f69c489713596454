"""Large batches: which accuracy does training with a large batch reach, and what improves it?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean

import pytest
from _pytest.mark import ParameterSet

from ddpperf.analysis.statistics import mean_interval, welch_interval
from ddpperf.plugin.cases import Case, case, if_valid, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import RunSpec, is_custom_model
from perf.common.by_set import per_set
from perf.common.recipes import Recipe, find_recipe, of_recipe, read_recipes
from perf.common.seeds import by_seed, over_epochs, over_seeds, references
from perf.common.step_metrics import cost_metrics, usage_metrics

FIGURES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


@pytest.fixture
def recipe(request: pytest.FixtureRequest, measure: Measure) -> Recipe:
    """Provide the recipe of a test case."""
    (name,) = request.node.get_closest_marker("recipe").args
    return find_recipe(measure.machine.device, name)


def trainings(options: Options, *, kind: str) -> Iterator[ParameterSet]:
    """Yield a training spec for each recipe of a kind.

    A recipe is skipped if an earlier recipe of the same kind has an equal spec. Trainings of the
    kind "report" are skipped on a CPU. A test has the id of its training spec if the kind is
    "recipe", and else the id of its recipe. The core suite has the first recipe of the kind
    "recipe", because it needs no reference training.
    """
    on_cpu_of_gpus = options.device == "cpu" and kind == "report"
    if is_custom_model(options.model):
        yield skipped(kind, f"{options.model} makes its own batches and has no test images")
        return
    seen: dict[RunSpec, str] = {}
    for number, recipe in enumerate(read_recipes("cuda" if on_cpu_of_gpus else options.device, kind)):
        training = if_valid(recipe.id, recipe.spec, options)
        if on_cpu_of_gpus:
            training = skipped(recipe.id, "whole trainings of ResNets take hours on a CPU; run them on GPUs")
        elif isinstance(training, RunSpec) and training in seen:  # both may have the same tuned rate
            training = skipped(recipe.id, f"it is the same training as {seen[training]!r}")
        elif isinstance(training, RunSpec):
            seen[training] = recipe.name
        identity = None if kind == "recipe" else recipe.id
        yield of_recipe(recipe, case(training, id=identity, core=kind == "recipe" and number == 0))


def largest_tuned(device: str) -> Recipe:
    """Return the training recipe with a tuned learning rate and the largest constant batch size."""
    candidates = [
        recipe for recipe in read_recipes(device) if recipe.rates and not recipe.fields["grow_from"]
    ]
    return max(candidates, key=lambda recipe: recipe.global_batch_size)


def on_all_devices(options: Options) -> Iterator[Case]:
    """Yield the training spec of the largest tuned batch size on all devices."""
    identity = size_id(options, max(options.world_sizes))
    if max(options.world_sizes) == 1:
        yield skipped(identity, "comparing devices needs two or more; pass --world-sizes 1,2")
    elif not is_custom_model(options.model):
        training = if_valid(identity, largest_tuned(options.device).spec, options)
        yield case(training, id=identity, core=False)


def long_runs(options: Options) -> Iterator[Case]:
    """Yield the specs of a 50-epoch training on one device and on all devices.

    The steps use the fastest execution mode of --executions.
    """
    for recipe in read_recipes("cuda", "long"):
        if options.device == "cpu":
            reason = "50 epochs take hours on a CPU; run them on GPUs"
            yield of_recipe(recipe, skipped("long", reason))
        elif not is_custom_model(options.model):
            for devices in sorted({1, max(options.world_sizes)}):
                identity = size_id(options, devices)
                chosen = dataclasses.replace(recipe, devices=devices)
                training = if_valid(identity, chosen.spec, options, execution=options.fastest_execution)
                yield of_recipe(recipe, case(training, id=identity, core=False))


@pytest.mark.specs(cases=partial(trainings, kind="recipe"))
def test_large_batch(measure: Measure, spec: RunSpec, recipe: Recipe) -> None:
    """Which loss and accuracy does a training with several remedies reach?"""
    train(measure, spec, recipe, "recipe")


@pytest.mark.specs(cases=partial(trainings, kind="remedy"))
def test_remedies(measure: Measure, spec: RunSpec, recipe: Recipe) -> None:
    """Which loss and accuracy does the reports' plain loop reach with one remedy, or with none?"""
    runs = train(measure, spec, recipe, "remedy")
    known = read_recipes(measure.machine.device, "remedy")
    plain = next(other for other in known if other.global_batch_size == recipe.global_batch_size)
    if plain != recipe:
        others = references(measure, "as_it_is", plain.like(spec), runs)
        compare(measure, "accuracy_over_as_it_is", runs, others)


@pytest.mark.specs(cases=partial(trainings, kind="report"))
def test_report_training(measure: Measure, spec: RunSpec, recipe: Recipe) -> None:
    """Which loss and accuracy do the trainings that course reports describe reach on this machine?"""
    train(measure, spec, recipe)


def train(measure: Measure, spec: RunSpec, recipe: Recipe, kind: str = "") -> list[Measured]:
    """Train by a recipe once for each seed, and compare it with the first recipe of `kind`, if given."""
    runs = by_seed(measure, spec, recipe.seeds)
    learned(measure, runs)
    baseline = read_recipes(measure.machine.device, kind)[0] if kind else recipe
    if recipe != baseline:
        others = references(measure, "baseline", baseline.like(spec), runs)
        compare(measure, "accuracy_over_baseline", runs, others)
    accuracies_of_reports(measure, recipe, runs)
    return runs


def accuracies_of_reports(measure: Measure, recipe: Recipe, runs: list[Measured]) -> None:
    """Store the accuracies that course reports state for this training.

    The reports trained on CIFAR-10, so nothing is stored for a training on synthetic images.
    """
    spec = runs[0].spec
    assert isinstance(spec, RunSpec)
    for name, accuracy in recipe.reported.items() if spec.data != "synthetic" else ():
        measure.metric(name, {sample.set: accuracy for sample in runs[0].samples})


def learned(measure: Measure, runs: list[Measured]) -> None:
    """Store the loss, accuracy and throughput of a training, averaged over its random seeds."""
    for name in FIGURES:
        values = per_set(mean, last(runs, name))
        if all(map(math.isfinite, values.values())):
            measure.metric(name, values)
    diverged = [epoch for run in runs for sample in run.samples if (epoch := diverged_epoch(run, sample))]
    if diverged:
        measure.warn(f"the training diverged: the loss is NaN or infinite in epoch {min(diverged)}")
    if len(runs) > 1:
        interval_metrics(measure, "test_accuracy", mean_interval, last(runs))
    best = over_seeds(runs, lambda run, sample: max(figures(run, sample, "test_accuracy")))
    measure.metric("best_test_accuracy", best)
    spec = runs[0].spec
    assert isinstance(spec, RunSpec)
    N, images, seconds = spec.world_size, spec.images, over_epochs(runs, "train_seconds")
    measure.metric("images_per_second", per_set(lambda t: images / t, seconds))
    measure.metric("device_seconds_of_training", per_set(lambda t: N * t, seconds))
    mirrored = over_seeds(runs, lambda run, sample: max(sample.counters["mirrored_test_accuracy"]))
    measure.metric("mirrored_test_accuracy", mirrored)
    if spec.precision == "fp16":  # in these steps gradients overflowed, so no parameter changed
        measure.metric("skipped_steps", over_epochs(runs, "skipped_steps"))
    usage_metrics(measure, runs[0])


def interval_metrics(
    measure: Measure,
    name: str,
    interval: Callable[..., tuple[float, float]],
    *accuracies: dict[str, list[float]],
) -> dict[str, tuple[float, float]]:
    """Store and return the interval of an accuracy or of a difference, for each process set.

    Stored ends are clipped to possible values: 0 to 1 for an accuracy, -1 to 1 for a difference.
    accuracies: the accuracies with each seed, by process set.
    """
    ends = per_set(interval, *accuracies)
    least = 0.0 if len(accuracies) == 1 else -1.0
    measure.metric(f"{name}_low", per_set(lambda ends: max(least, ends[0]), ends))
    measure.metric(f"{name}_high", per_set(lambda ends: min(1.0, ends[1]), ends))
    return ends


def compare(measure: Measure, name: str, runs: list[Measured], others: list[Measured]) -> bool:
    """Store the difference of two mean test accuracies with its Welch interval.

    Returns whether the interval contains zero. With one seed there is no interval, and the result
    is True.
    """
    measure.metric(name, per_set(lambda ours, theirs: mean(ours) - mean(theirs), last(runs), last(others)))
    if len(runs) < 2:
        return True  # one seed has no interval
    ends = interval_metrics(measure, name, welch_interval, last(runs), last(others))
    return all(low <= 0 <= high for low, high in ends.values())


def last(runs: list[Measured], name: str = "test_accuracy") -> dict[str, list[float]]:
    """Return a figure after the last epoch of each training, for each process set."""
    return {one.set: [figures(run, run.of_set(one.set), name)[-1] for run in runs] for one in runs[0].samples}


def figures(run: Measured, sample: Sample, name: str) -> list[float]:
    """Return a figure, such as the test accuracy, after each epoch: the mean over all ranks.

    The loss of a training that diverged is NaN.
    """
    assert isinstance(run.spec, RunSpec)
    names = [f"{name}_{epoch}" for epoch in range(1, run.spec.epochs + 1)]
    return [mean(sample.counters.get(name, [math.nan])[: run.spec.world_size]) for name in names]


def diverged_epoch(run: Measured, sample: Sample) -> int:
    """Return the number of the first epoch without a finite loss, or 0 if there is none."""
    losses = zip(figures(run, sample, "train_loss"), figures(run, sample, "test_loss"), strict=True)
    return next((epoch for epoch, found in enumerate(losses, 1) if not all(map(math.isfinite, found))), 0)


@pytest.mark.specs(cases=on_all_devices)
def test_same_result_on_more_devices(measure: Measure, spec: RunSpec) -> None:
    """Do several devices reach the accuracy of one device with the same global batch size?

    Two mistakes are measured, too: training without set_epoch, and a learning rate that fits the
    batch size of one rank.
    """
    recipe = largest_tuned(measure.machine.device)
    runs = by_seed(measure, spec, recipe.seeds)
    learned(measure, runs)
    ones = one_device_costs(measure, spec, runs)
    if not compare(measure, "accuracy_over_one_device", runs, ones):
        measure.warn(
            "the accuracies on all devices and on one device differ by more than random seeds explain"
        )
    unscaled = spec.rate / spec.world_size  # the linear scaling rule at the batch size of one rank
    for name, changed in (("without_set_epoch", {"set_epoch": False}), ("unscaled_rate", {"rate": unscaled})):
        others = references(measure, name, dataclasses.replace(spec, **changed), runs)
        compare(measure, f"accuracy_{name}", others, runs)


@pytest.mark.specs(cases=long_runs)
def test_long_run(measure: Measure, spec: RunSpec, recipe: Recipe) -> None:
    """Which test accuracy does a training of 50 epochs reach, and what do more devices cost?"""
    runs = by_seed(measure, spec, recipe.seeds)
    learned(measure, runs)
    if spec.world_size > 1:
        one_device_costs(measure, spec, runs)


def one_device_costs(measure: Measure, spec: RunSpec, runs: list[Measured]) -> list[Measured]:
    """Measure the same training on one device, and store the device time that it saves.

    The global batch sizes are the same. Returns the trainings on one device.
    """
    N = spec.world_size
    alone = dataclasses.replace(
        spec.one_device(), per_rank_batch_size=spec.global_batch_size, grow_from=N * spec.grow_from
    )
    ones = references(measure, "one_device", alone, runs)
    cost_metrics(
        measure, over_epochs(ones, "train_seconds"), over_epochs(runs, "train_seconds"), N, of="of_training"
    )
    return ones
