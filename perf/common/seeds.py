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
    others = [dataclasses.replace(spec, seed=spec.seed + more) for more in range(1, count)]
    return [measure(spec), *(measure.reference(f"seed={other.seed}", other) for other in others)]


def references(measure: Measure, name: str, spec: RunSpec, runs: list[Measured]) -> list[Measured]:
    """Measure another training with the same random seeds as the given runs.

    The stored references are called "NAME, seed=N".
    """
    seeds = [run.spec.seed for run in runs]
    return [measure.reference(f"{name}, seed={seed}", dataclasses.replace(spec, seed=seed)) for seed in seeds]


def over_epochs(runs: list[Measured], counter: str) -> dict[str, float]:
    """Return the sum of a counter over the epochs of a training, for each process set.

    The sum is averaged over the random seeds. In each epoch, the rank with the largest value counts.
    counter: such as "train_seconds", which does not include the evaluations after the epochs.
    """

    def total(run: Measured, sample: Sample) -> float:
        assert isinstance(run.spec, RunSpec)
        return sum(max(sample.counters[f"{counter}_{epoch}"]) for epoch in range(1, run.spec.epochs + 1))

    return over_seeds(runs, total)


def over_seeds(runs: list[Measured], value_of: Callable[[Measured, Sample], float]) -> dict[str, float]:
    """Return the mean of a value over the random seeds, for each process set."""
    return {one.set: mean(value_of(run, run.of_set(one.set)) for run in runs) for one in runs[0].samples}
