"""The fraction of an epoch that loading takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddpperf.analysis.batch_size import LEAST_FRACTION, enough_workers
from ddpperf.results.samples import Sample
from ddpperf.specs import EpochSpec
from perf.test_batch_size import test_batch_size as batch_size
from perf.test_batch_size import test_loader_workers as loader_workers
from tests.fake_measure import FakeMeasure


@pytest.mark.parametrize(
    ("by_workers", "enough"),
    [
        ({0: 0.5, 1: 0.2, 2: 0.04, 4: 0.01}, 2),
        ({4: 0.01, 2: 0.04, 1: 0.2, 0: 0.5}, 2),  # in whichever order they were measured
        ({0: -0.01, 8: 0.0}, 0),
        ({0: 0.2, 1: 0.04, 2: 0.11, 4: 0.09, 8: 0.02}, 8),  # one lucky count is not enough
        ({0: 0.5, 8: LEAST_FRACTION}, None),  # a share from which on loading limits
        ({}, None),
    ],
)
def test_enough_is_the_fewest_sufficient_workers(by_workers: dict[int, float], enough: int | None) -> None:
    assert enough_workers(by_workers) == enough


def measure_with(fractions: dict[str, dict[int, float]]) -> Any:
    """Return a `measure` fixture whose epochs take 1 s, and longer by a side's fraction for its workers."""

    def samples(spec: EpochSpec) -> Iterator[Sample]:
        for number in (1, 2):
            for side, by_workers in fractions.items():
                fraction = by_workers[spec.loader_workers] if spec.input == "dataloader" else 0.0
                seconds = ((1 / (1 - fraction),),)
                yield Sample(set=f"{side}{number}", side=side, torch="2", seconds=seconds)

    return FakeMeasure(samples)


BASE = {0: 0.3, 1: 0.02, 2: 0.01}
EPOCH = EpochSpec(
    world_size=1,
    per_rank_batch_size=4,
    strategy="single",
    epoch_images=64,
    input="dataloader",
    loader_workers=2,
)


@pytest.mark.parametrize(
    ("candidate", "enough", "warnings"),
    [
        (BASE, {"A1": 1, "B1": 1, "A2": 1, "B2": 1}, []),
        ({0: 0.3, 1: 0.2, 2: 0.01}, {"A1": 1, "B1": 2, "A2": 1, "B2": 2}, []),
        ({0: 0.3, 1: 0.2, 2: 0.15}, None, ["loading limits the epoch even with 2 workers, candidate"]),
    ],
)
def test_base_and_candidate_need_their_own_workers(
    candidate: dict[int, float], enough: dict[str, int] | None, warnings: list[str]
) -> None:
    measure = measure_with({"A": BASE, "B": candidate})
    loader_workers(measure, EPOCH)
    assert measure.metrics.get("enough_workers") == enough
    assert measure.warnings == warnings


@pytest.mark.parametrize(
    ("fractions", "warnings"),
    [
        ({"A": BASE, "B": {2: 0.2}}, ["loading limits the epoch, candidate"]),
        ({"A": {2: 0.2}, "B": BASE}, ["loading limits the epoch, base"]),
        ({"A": BASE, "B": BASE}, []),
    ],
)
def test_an_epoch_that_loading_limits_is_named_with_its_side(
    fractions: dict[str, dict[int, float]], warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perf.test_batch_size.training_metrics", lambda measure, epoch: None)
    measure = measure_with(fractions)
    batch_size(measure, EPOCH)
    assert measure.warnings == warnings
