"""The largest size that fits: found with few trials, each of them made once."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.batch_size import MOST, RESOLUTION, largest_that_fits
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import TrainingSpec
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from perf.test_batch_size import test_largest_batch as largest_batch
from tests.fake_measure import FakeMeasure, measuring
from tests.generated import BOUNDED
from tests.project import Project


@BOUNDED
@given(st.integers(0, 10**8), st.integers(1, 64))
def test_largest_size_is_found_to_a_sixteenth(limit: int, first: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = largest_that_fits(fits, first)
    assert len(tried) == len(set(tried)), "a trial may cost a minute"
    if limit < first:
        assert found == 0
        assert tried == [first]
        return
    assert found in tried
    assert found <= limit <= found + max(1, found * RESOLUTION)
    assert len(tried) < 25


def test_search_ends_if_everything_fits() -> None:
    assert MOST / 4 < largest_that_fits(lambda size: True, 32) <= MOST


MODEL = """
import os
import torch
from torch import nn

class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, rows):
        if len(rows) > 100:
            raise torch.OutOfMemoryError("no room")
        return rows @ self.weight

def narrow():
    return Narrow(), lambda size: (torch.ones(size, 4), torch.ones(size, 4)), nn.functional.mse_loss
"""
EXPERIMENT = """
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import TrainingSpec
from perf.test_batch_size import test_largest_batch as largest

SPEC = TrainingSpec(model="mine:narrow", world_size=1, per_rank_batch_size=32, strategy="single")

def test_it(measure):
    largest(measure, SPEC)

def test_next(measure):
    measure(SPEC)
"""


@pytest.mark.slow
def test_batches_grow_until_memory_ends_on_real_ranks(project: Project) -> None:
    """The next test runs on fresh ranks."""
    project.experiment.write_text(EXPERIMENT)
    (project.root / "mine.py").write_text(MODEL)
    sizes = ("--world-sizes", "1", "--batch-sizes", "32", "--rounds", "1")
    run = project.run("perf", "--model", "mine:narrow", *sizes)
    run.assert_one_sentence(0, "PASS: 2 tests measured")
    run.assert_one_sentence(
        0, "a batch of 104 does not fit: rank 0 of set A", "raised OutOfMemoryError: no room (at open)"
    )
    assert project.measured()["test_it"]["metrics"]["largest_batch_size"]["value"] == 98


class FullDevice(FakeMeasure):
    """A `measure` fixture of a device on which 100 images fit, each of which takes a second."""

    def __init__(self) -> None:
        super().__init__(lambda spec: [images(spec.per_rank_batch_size)])

    def attempt(self, spec: TrainingSpec) -> Measured | str:
        return self(spec) if spec.per_rank_batch_size <= 100 else "no room"


def images(count: int) -> Sample:
    size = (float(count),)
    return Sample(set="A1", side="A", torch="2", seconds=(size,), counters={"peak_memory_bytes": size})


def test_batches_grow_until_one_does_not_fit() -> None:
    measure: Any = FullDevice()
    largest_batch(measure, TrainingSpec(world_size=1, per_rank_batch_size=32, strategy="single"))
    assert measure.metrics["largest_batch_size"] == {"A1": 98}
    for size in (32, 80, 92, 98):
        assert measure.metrics[f"images_per_second_at_{size}"] == {"A1": 1}
        assert measure.metrics[f"peak_memory_bytes_at_{size}"] == {"A1": size}
    assert "step_seconds_at_104" not in measure.metrics
    assert "a batch of 104 does not fit: no room" in measure.notes


@pytest.mark.parametrize(
    ("cause", "limit", "fits"),
    [(Cause.RAISED, True, False), (Cause.RAISED, False, None), (Cause.DIED, False, None)],
)
def test_only_a_limit_is_an_answer(cause: Cause, limit: bool, fits: bool | None) -> None:
    """A lost device and a mistake fail the test."""
    failure = RankFailure(rank=0, cause=cause, what="raised NoRoom: 3 GB", detail="lines", limit=limit)

    class FullPool:
        counted_seconds = 0.0

        def measure_alone(self, spec: object) -> None:
            raise SetFailure("A1", "at open", [failure])

    measure = Measure(cast(Any, None), measuring(pool=FullPool()))
    spec = TrainingSpec(world_size=1, per_rank_batch_size=32, strategy="single")
    if fits is False:
        assert measure.attempt(spec) == "rank 0 of set A1 raised NoRoom: 3 GB (at open)"
    else:
        with pytest.raises(pytest.fail.Exception, match="rank 0 of set A1 raised NoRoom"):
            measure.attempt(spec)
