"""Functions that measure whole trainings, each with several random seeds."""

from __future__ import annotations

import dataclasses
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
    """Measure another training with the seeds of some runs.

    The stored references are called "NAME, seed=N".
    """
    seeds = [run.spec.seed for run in runs]
    return [measure.reference(f"{name}, seed={seed}", dataclasses.replace(spec, seed=seed)) for seed in seeds]


def training_seconds(runs: list[Measured]) -> dict[str, float]:
    """Return the seconds of a training, averaged over its random seeds, for each process set.

    The evaluations after the epochs are not included.
    """
    sets = [sample.set for sample in runs[0].samples]
    return {of_set: mean(sum(epoch_seconds(run, run.of_set(of_set))) for run in runs) for of_set in sets}


def epoch_seconds(run: Measured, sample: Sample) -> list[float]:
    """Return the seconds that each epoch of a training took on its slowest rank."""
    assert isinstance(run.spec, RunSpec)
    return [max(sample.counters[f"train_seconds_{epoch}"]) for epoch in range(1, run.spec.epochs + 1)]
