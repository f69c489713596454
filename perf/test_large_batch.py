"""Large batches: which accuracy does training with a large batch reach, and what improves it?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import mean, stdev

import pytest

from ddpperf.analysis.statistics import mean_interval, welch_interval
from ddpperf.plugin.cases import Case, if_valid, named, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import RunSpec, is_custom_model
from perf.common import core
from perf.common.recipes import Recipe, read_recipes, seeds_of
from perf.common.training_metrics import cost_metrics, usage_metrics

CONFIDENCE = 0.95
# The test accuracies of two course reports after five epochs on CIFAR-10, each with a small batch
# and with a large batch.
REPORTED = ((0.8490, 0.7390), (0.8222, 0.6337))
FIGURES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


def recipes(options: Options) -> Iterator[Case]:
    """Yield a training spec for each recipe in perf/recipes.toml.

    A recipe whose spec equals that of an earlier recipe is skipped.
    """
    if is_custom_model(options.model):
        yield skipped("recipes", f"{options.model} makes its own batches and has no test images")
        return
    seen: dict[RunSpec, str] = {}
    for recipe in read_recipes(options.device):
        case = if_valid(recipe.name, recipe.spec, options)
        if isinstance(case, RunSpec) and case in seen:  # two recipes may have the same tuned learning rate
            yield skipped(recipe.name, f"it is the same training as {seen[case]!r}")
        else:
            yield case
            if isinstance(case, RunSpec):
                seen[case] = recipe.name


def largest_tuned(device: str) -> Recipe:
    """Return the training recipe with a tuned learning rate and the largest constant batch size."""
    candidates = [
        recipe for recipe in read_recipes(device) if recipe.rates and not recipe.fields["grow_from"]
    ]
    return max(candidates, key=lambda recipe: recipe.global_batch_size)


def on_all_devices(options: Options) -> Iterator[Case]:
    """Yield the training spec of the largest tuned batch size on all devices."""
    if max(options.world_sizes) == 1:
        yield skipped(
            size_id(options.device, 1), "comparing devices needs two or more; pass --world-sizes 1,2"
        )
    elif not is_custom_model(options.model):
        identity = size_id(options.device, max(options.world_sizes))
        yield named(identity, if_valid(identity, largest_tuned(options.device).spec, options))


def long_runs(options: Options) -> Iterator[Case]:
    """Yield the specs of a 50-epoch training on one device and on all devices.

    The steps use the fastest execution mode of --executions.
    """
    if options.device == "cpu":
        yield skipped("long", "50 epochs take hours on a CPU; run them on GPUs")
    if options.device == "cpu" or is_custom_model(options.model):
        return
    for recipe in read_recipes(options.device, "long"):
        for devices in sorted({1, max(options.world_sizes)}):
            identity, chosen = size_id(options.device, devices), dataclasses.replace(recipe, devices=devices)
            case = if_valid(identity, chosen.spec, options, execution=options.fastest_execution)
            yield named(identity, case)


@pytest.mark.specs(cases=recipes, core=core.large_batch)
def test_large_batch(measure: Measure, spec: RunSpec) -> None:
    """Which loss and accuracy does a training recipe reach, on average over random seeds?"""
    device = measure.machine.device
    runs = by_seed(measure, spec)
    baseline, *_ = read_recipes(device)
    small = baseline.like(spec)
    small_runs = runs
    if spec != small:
        small_runs = [
            measure.reference(f"baseline, seed={run.spec.seed}", of_seed(small, run)) for run in runs
        ]
    learned(measure, runs)
    if spec != small:
        compare(measure, "accuracy_over_baseline", runs, small_runs)
    by_epoch = {
        name: zip(*(figures(run, run.samples[0], name) for run in runs), strict=True) for name in FIGURES
    }
    listed = [
        f"{name.replace('_', ' ')} {', '.join(f'{mean(seeds):.4g}' for seeds in epochs)}"
        for name, epochs in by_epoch.items()
    ]
    measure.note(f"by epoch: {'; '.join(listed)}")
    if spec.global_batch_size > small.global_batch_size and spec.epochs == 5 and spec.data != "synthetic":
        reported = " and ".join(f"{of_small:.2%} against {of_large:.2%}" for of_small, of_large in REPORTED)
        here = " against ".join(
            f"{mean(last(of_batch, runs[0].samples[0].set)):.2%}" for of_batch in (small_runs, runs)
        )
        measure.note(f"small against large batch after 5 epochs: course reports {reported}; this run {here}")


def of_seed(spec: RunSpec, run: Measured) -> RunSpec:
    return dataclasses.replace(spec, seed=run.spec.seed)


def by_seed(measure: Measure, spec: RunSpec, kind: str = "seeds") -> list[Measured]:
    """Run the same training once for each random seed, and return the measurements.

    kind: the key of perf/recipes.toml that has the number of seeds.
    """
    first = measure(spec)
    seeds = range(spec.seed + 1, spec.seed + seeds_of(measure.machine.device, kind))
    return [
        first,
        *(measure.reference(f"seed={seed}", dataclasses.replace(spec, seed=seed)) for seed in seeds),
    ]


def learned(measure: Measure, runs: list[Measured]) -> None:
    """Store the loss, accuracy and throughput of a training, averaged over its random seeds."""
    sets = [sample.set for sample in runs[0].samples]
    for name in FIGURES:
        measure.metric(name, {of_set: mean(last(runs, of_set, name)) for of_set in sets})
    if len(runs) > 1:
        ends = {of_set: mean_interval(last(runs, of_set), CONFIDENCE) for of_set in sets}
        measure.metric("test_accuracy_low", {of_set: max(0.0, low) for of_set, (low, _) in ends.items()})
        measure.metric("test_accuracy_high", {of_set: min(1.0, high) for of_set, (_, high) in ends.items()})
    best = {
        of_set: mean(max(figures(run, run.of_set(of_set), "test_accuracy")) for run in runs)
        for of_set in sets
    }
    measure.metric("best_test_accuracy", best)
    spec = runs[0].spec
    assert isinstance(spec, RunSpec)
    seconds = training_seconds(runs)
    measure.metric("images_per_second", {of_set: spec.images / t for of_set, t in seconds.items()})
    measure.metric("device_seconds_of_training", {name: spec.world_size * t for name, t in seconds.items()})
    mirrored = [run.counter("mirrored_test_accuracy") for run in runs]
    if known := set.intersection(*map(set, mirrored)):  # ranks of older code do not evaluate mirror images
        means = {of_set: mean(found[of_set] for found in mirrored) for of_set in sets if of_set in known}
        measure.metric("mirrored_test_accuracy", means)
    if spec.precision == "fp16":
        skipped = {of_set: mean(skipped_steps(run.of_set(of_set)) for run in runs) for of_set in sets}
        measure.metric("skipped_steps", skipped)
    usage_metrics(measure, runs[0])
    if any(max(sample.counters["resumed_epochs"]) for run in runs for sample in run.samples):
        measure.warn("the training was resumed from a checkpoint")


def training_seconds(runs: list[Measured]) -> dict[str, float]:
    """Return the seconds of a training, averaged over its random seeds, for each process set."""
    sets = [sample.set for sample in runs[0].samples]
    return {of_set: mean(sum(slowest(run, run.of_set(of_set))) for run in runs) for of_set in sets}


def skipped_steps(sample: Sample) -> float:
    """Return how many steps of an fp16 training changed no parameter, because gradients overflowed."""
    return sum(max(ranks) for name, ranks in sample.counters.items() if name.startswith("skipped_steps_"))


def compare(measure: Measure, name: str, runs: list[Measured], others: list[Measured]) -> bool:
    """Store the difference of two mean test accuracies with its Welch interval.

    Returns whether the interval contains zero. With one seed there is no interval, and the result
    is True.
    """
    sets = [sample.set for sample in runs[0].samples]
    measure.metric(name, {of_set: mean(last(runs, of_set)) - mean(last(others, of_set)) for of_set in sets})
    if len(runs) < 2:
        return True  # one seed has no interval
    ends = {}
    for of_set in sets:
        ours, theirs = last(runs, of_set), last(others, of_set)
        if stdev(ours) + stdev(theirs) > 0:
            ends[of_set] = welch_interval(ours, theirs, CONFIDENCE)
        else:
            ends[of_set] = (mean(ours) - mean(theirs),) * 2
    measure.metric(f"{name}_low", {of_set: max(-1.0, low) for of_set, (low, _) in ends.items()})
    measure.metric(f"{name}_high", {of_set: min(1.0, high) for of_set, (_, high) in ends.items()})
    return all(low <= 0 <= high for low, high in ends.values())


def last(runs: list[Measured], of_set: str, name: str = "test_accuracy") -> list[float]:
    """Return a figure, such as the test accuracy, after the last epoch of each training."""
    return [figures(run, run.of_set(of_set), name)[-1] for run in runs]


def figures(run: Measured, sample: Sample, name: str) -> list[float]:
    """Return a figure, such as the test accuracy, after each epoch: the mean over all ranks."""
    assert isinstance(run.spec, RunSpec)
    ranks = run.spec.world_size
    return [mean(sample.counters[f"{name}_{epoch}"][:ranks]) for epoch in range(1, run.spec.epochs + 1)]


def slowest(run: Measured, sample: Sample) -> list[float]:
    """Return the seconds that each epoch of a training took on its slowest rank."""
    assert isinstance(run.spec, RunSpec)
    return [max(sample.counters[f"train_seconds_{epoch}"]) for epoch in range(1, run.spec.epochs + 1)]


@pytest.mark.specs(cases=on_all_devices, core=core.never)
def test_same_result_on_more_devices(measure: Measure, spec: RunSpec) -> None:
    """Do several devices reach the accuracy of one device with the same global batch size?

    Two mistakes are measured, too: training without set_epoch, and a learning rate that fits the
    batch size of one rank.
    """
    runs = by_seed(measure, spec)
    learned(measure, runs)
    alone = dataclasses.replace(largest_tuned(measure.machine.device), devices=1).like(spec)
    ones = [measure.reference(f"one_device, seed={run.spec.seed}", of_seed(alone, run)) for run in runs]
    cost_metrics(measure, training_seconds(ones), training_seconds(runs), spec.world_size, of="of_training")
    if not compare(measure, "accuracy_over_one_device", runs, ones):
        measure.warn("all devices reach another accuracy than one device, by more than seeds explain")
    unscaled = spec.rate / spec.world_size  # the linear scaling rule at the batch size of one rank
    for name, changed in (("without_set_epoch", {"set_epoch": False}), ("unscaled_rate", {"rate": unscaled})):
        others = [
            measure.reference(f"{name}, seed={run.spec.seed}", dataclasses.replace(run.spec, **changed))
            for run in runs
        ]
        compare(measure, f"accuracy_{name}", others, runs)


@pytest.mark.specs(cases=long_runs, core=core.never)
def test_long_run(measure: Measure, spec: RunSpec) -> None:
    """Which test accuracy does a training of 50 epochs reach, and what do more devices cost?"""
    runs = by_seed(measure, spec, "long_seeds")
    learned(measure, runs)
    if spec.world_size > 1:
        alone = on_one_device(spec)
        ones = [measure.reference(f"one_device, seed={run.spec.seed}", of_seed(alone, run)) for run in runs]
        cost_metrics(
            measure, training_seconds(ones), training_seconds(runs), spec.world_size, of="of_training"
        )


def on_one_device(spec: RunSpec) -> RunSpec:
    """Return the spec of the same training on one device, with the same global batch sizes."""
    N = spec.world_size
    alone = spec.one_device()
    return dataclasses.replace(
        alone, per_rank_batch_size=spec.global_batch_size, grow_from=N * spec.grow_from
    )
