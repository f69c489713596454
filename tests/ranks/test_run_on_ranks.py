"""All ranks are evaluated with the mean of their BatchNorm statistics."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.training import evaluation
from ddpperf.training import whole_training as run_module
from tests.ranks.test_run import CPU, SMALL

RANKS = 2
SPEC = dataclasses.replace(SMALL, world_size=RANKS, strategy="ddp", per_rank_batch_size=8, buffer_sync=False)


def statistics_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers() if buffer.is_floating_point()]


def train_as_rank(rank: int, folder: Path, recompute_statistics: bool) -> None:
    """Train a run, and store its statistics before and after the last averaging."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    before: list[Tensor] = []

    def averaged(model: nn.Module, world_size: int) -> None:
        before[:] = statistics_of(model)
        evaluation.average_buffers(model, world_size)

    with mock.patch.object(run_module, "average_buffers", averaged):
        spec = dataclasses.replace(SPEC, recompute_statistics=recompute_statistics)
        run = run_module.TrainingRun(spec, rank=rank, device=CPU)
        run.warm_up(2)
        run.step()
        run.finish()
    torch.save((before, statistics_of(run.training.module)), folder / str(rank))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("recompute_statistics", [False, True])
def test_all_ranks_are_evaluated_with_mean_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute_statistics: bool
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(train_as_rank, (tmp_path, recompute_statistics), nprocs=RANKS)
    (ours, after), (theirs, same) = (torch.load(tmp_path / str(rank)) for rank in range(RANKS))
    assert len(after) > 10
    assert any(not torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), (
        "of images of its own"
    )
    for one, other, mean, seen in zip(ours, theirs, after, same, strict=True):
        assert torch.equal(mean, seen)
        torch.testing.assert_close(mean, (one + other) / 2)
