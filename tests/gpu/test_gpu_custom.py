"""The user's own steps and collectives on GPUs, eager and captured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddpperf.init.__main__ import write
from ddpperf.specs import FUNCTIONS_VARIABLE, CustomCollectiveSpec, CustomStepSpec
from ddpperf.training.custom_step import CustomStep
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests.gpu.shared import GPU

FUNCTIONS = """
import torch
import torch.distributed as dist

def all_reduce(buffer):
    dist.all_reduce(buffer)

def make_step(rank, world_size, batch_size, device):
    weight = torch.ones(8, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    rows = torch.arange(8.0 * batch_size, device=device).view(batch_size, 8) / 100

    def train_step():
        optimizer.zero_grad()
        loss = (rows @ weight).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return train_step
"""


@pytest.mark.usefixtures("own_stream")
def test_captured_step_trains_like_the_eager_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(FUNCTIONS_VARIABLE, "gpu_functions:make_step")
    losses: list[list[float]] = []
    step = CustomStepSpec(function="gpu_functions:make_step", world_size=1, per_rank_batch_size=4)
    for spec in (step, replace(step, execution="graph")):
        custom = CustomStep(spec, rank=0, device=GPU)
        custom.warm_up(11)
        losses.append([])
        for _ in range(8):
            custom.step()
            losses[-1].append(custom.loss.item())
        custom.end_round(8)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0], "it trains"


def test_own_functions_are_captured_and_measured(tmp_path: Path) -> None:
    """The written example, and, on two GPUs, a collective whose result is checked."""
    (tmp_path / "gpu_functions.py").write_text(FUNCTIONS)
    write(tmp_path)
    functions = "gpu_functions:all_reduce,perf.step:make_step"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    side = Side(root=tmp_path, environment={"PYTHONPATH": path, FUNCTIONS_VARIABLE: functions})
    N = min(2, torch.cuda.device_count())
    step = CustomStepSpec(
        function="perf.step:make_step", world_size=N, per_rank_batch_size=32, execution="graph"
    )
    call = CustomCollectiveSpec(
        function="gpu_functions:all_reduce", world_size=2, nbytes=2**20, execution="graph"
    )
    with Pool(SetOptions(size=N, device="cuda", rounds=3, deadline_seconds=120), sides=[side]) as pool:
        for spec in (step, call)[:N]:
            (seconds,) = pool.measure(spec).median_step_seconds().values()
            assert 0 < seconds < 0.1
