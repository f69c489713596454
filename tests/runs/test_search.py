"""The largest size that fits: found with few trials, each of them made once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.analysis.search import MOST, RESOLUTION, largest_that_fits
from tests.generated import BOUNDED
from tests.project import Finished, Project


@BOUNDED
@given(st.integers(0, 10**8), st.integers(1, 64))
def test_the_largest_is_found_to_a_sixteenth(limit: int, first: int) -> None:
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


def test_what_always_fits_ends() -> None:
    assert MOST / 4 < largest_that_fits(lambda size: True, 32) <= MOST


@pytest.mark.parametrize(("limit", "sizes"), [(100, [32, 128, 80, 104, 92, 98]), (31, [32])])
def test_the_sizes_are_four_fold_then_halfway(limit: int, sizes: list[int]) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    largest_that_fits(fits, 32)
    assert tried == sizes


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
            FULL
        return rows @ self.weight

def narrow():
    return Narrow(), lambda size: (torch.ones(size, 4), torch.ones(size, 4)), nn.functional.mse_loss
"""
EXPERIMENT = """
from ddpperf.specs import TrainingSpec
from perf.test_batch_size import test_largest_batch as largest

SPEC = TrainingSpec(model="mine:narrow", world_size=1, per_rank_batch_size=32, strategy="single")

def test_it(measure):
    largest(measure, SPEC)

def test_next(measure):
    measure(SPEC)
"""


def sweep(project: Project, full: str) -> Finished:
    project.experiment.write_text(EXPERIMENT)
    (project.root / "mine.py").write_text(MODEL.replace("FULL", full))
    sizes = ("--world-sizes", "1", "--batch-sizes", "32", "--rounds", "1")
    return project.run("perf", "--model", "mine:narrow", *sizes)


def test_batches_are_tried_until_memory_ends_and_the_next_test_runs(project: Project) -> None:
    run = sweep(project, "raise torch.OutOfMemoryError('no room')")
    run.assert_one_sentence(0, "PASS: 2 tests measured")
    metrics = project.measured()["test_it"]["metrics"]
    assert metrics["largest_batch_size"]["value"] == 98
    for size in (32, 80, 92, 98):
        assert (
            metrics[f"images_per_second_at_{size}"]["value"]
            == size / metrics[f"step_seconds_at_{size}"]["value"]
        )
    assert "step_seconds_at_104" not in metrics
    run.assert_one_sentence(
        0, "a batch of 104 does not fit: rank 0 of set A", "raised OutOfMemoryError: no room (at open)"
    )
    run.assert_one_sentence(0, "98 images fit")


def test_a_librarys_limit_is_an_answer(project: Project) -> None:
    run = sweep(project, "raise RuntimeError('CUDNN_STATUS_NOT_SUPPORTED')")
    run.assert_one_sentence(
        0, "a batch of 104 does not fit", "raised RuntimeError: CUDNN_STATUS_NOT_SUPPORTED (at open)"
    )


def test_a_device_that_is_lost_is_no_answer(project: Project) -> None:
    run = sweep(project, "os._exit(3)")
    assert run.status == 1, run
    assert "exited with status 3" in run.output
    assert "Traceback" not in run.output


def test_a_mistake_is_no_answer(project: Project) -> None:
    run = sweep(project, "raise NotImplementedError('yet')")
    assert run.status == 1, run
    assert "raised NotImplementedError: yet" in run.output
    assert "does not fit" not in run.output
