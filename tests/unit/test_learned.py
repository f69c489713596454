"""What is stored of a whole training besides its loss and accuracy."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import RunSpec
from perf.test_large_batch import compare, learned
from tests.fake_measure import FakeMeasure

FIELDS: dict[str, Any] = {"world_size": 1, "per_rank_batch_size": 4, "strategy": "single", "input": "device"}
FIELDS |= {"epochs": 2, "test_images": 8, "rate": 0.1}
FIGURES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "train_seconds", "skipped_steps")


def sample(name: str, **counters: float) -> Sample:
    found = {f"{figure}_{epoch}": 0.5 for figure in FIGURES for epoch in (1, 2)}
    found["mirrored_test_accuracy"] = 0.5
    by_rank: dict[str, tuple[float, ...]] = {
        counter: (value,) for counter, value in (found | counters).items()
    }
    return Sample(set=name, side=name[0], torch="2.11", seconds=((1.0,),), counters=by_rank)


def metrics_of(*runs: tuple[Sample, ...], **fields: Any) -> dict[str, dict[str, float]]:
    """Return the metrics of a training, where `runs` are the samples of each seed."""
    measured = [
        Measured(spec=RunSpec(**FIELDS, **fields, seed=seed), iterations=1, samples=samples)
        for seed, samples in enumerate(runs)
    ]
    measure = FakeMeasure()
    learned(cast(Measure, measure), measured)
    return measure.metrics


def test_mirrored_accuracy_is_the_mean_over_seeds() -> None:
    found = metrics_of(
        (sample("A1", mirrored_test_accuracy=0.5),), (sample("A1", mirrored_test_accuracy=0.75),)
    )
    assert found["mirrored_test_accuracy"] == {"A1": 0.625}


@pytest.mark.parametrize(("precision", "skipped"), [("fp16", {"A1": 4.0}), ("bf16", None)])
def test_skipped_steps_are_added_over_epochs(precision: str, skipped: dict[str, float] | None) -> None:
    runs = (sample("A1", skipped_steps_1=3.0, skipped_steps_2=2.0), sample("A1", skipped_steps_2=2.5))
    found = metrics_of(*((run,) for run in runs), precision=precision)
    assert found.get("skipped_steps") == skipped


def test_difference_is_of_the_first_trainings_to_the_others() -> None:
    spec = RunSpec(**FIELDS)
    ours, theirs = (
        [Measured(spec=spec, iterations=1, samples=(sample("A1", test_accuracy_2=accuracy),))]
        for accuracy in (0.75, 0.25)
    )
    measure = FakeMeasure()
    assert compare(cast(Measure, measure), "accuracy_over_baseline", ours, theirs)
    assert measure.metrics == {"accuracy_over_baseline": {"A1": 0.5}}
