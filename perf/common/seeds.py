"""Functions that measure whole trainings, each with several random seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from statistics import mean

from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import RunSpec


def by_seed(measure: Measure, spec: RunSpec, count: int) -> list[Measured]:
    """Run the same training once for each of `count` random seeds, and return the measurements."""
    first = measure(spec)
    seeds = range(spec.seed + 1, spec.seed + count)
    return [
        first,
        *(measure.reference(f"seed={seed}", dataclasses.replace(spec, seed=seed)) for seed in seeds),
    ]


def references(measure: Measure, name: str, spec: RunSpec, runs: list[Measured]) -> list[Measured]:
    """Measure another training with the same random seeds as the given runs.

    The stored references are called "NAME, seed=N".
    """
    seeds = [run.spec.seed for run in runs]
    return [measure.reference(f"{name}, seed={seed}", dataclasses.replace(spec, seed=seed)) for seed in seeds]


def training_seconds(runs: list[Measured]) -> dict[str, float]:
    """Return the seconds of a training, averaged over its random seeds, for each process set.

    The time of a training is the sum over its epochs, each on its slowest rank. The evaluations after
    the epochs are not included.
    """

    def seconds(run: Measured, sample: Sample) -> float:
        assert isinstance(run.spec, RunSpec)
        epochs = range(1, run.spec.epochs + 1)
        return sum(max(sample.counters[f"train_seconds_{epoch}"]) for epoch in epochs)

    return over_seeds(runs, seconds)


def over_seeds(runs: list[Measured], value_of: Callable[[Measured, Sample], float]) -> dict[str, float]:
    """Return the mean of a value over the random seeds, for each process set."""
    return {one.set: mean(value_of(run, run.of_set(one.set)) for run in runs) for one in runs[0].samples}
