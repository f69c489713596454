"""The user's own steps and collectives on GPUs, eager and captured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddpperf.init.__main__ import write
from ddpperf.specs import FUNCTIONS_VARIABLE, CustomCollectiveSpec, CustomStepSpec
from ddpperf.specs.collective import CallExecution
from ddpperf.training.custom_step import CustomStep
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a project with the functions; this process can import them, too."""
    mine = tmp_path_factory.mktemp("custom")
    (mine / "gpu_functions.py").write_text(FUNCTIONS)
    write(mine)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(mine)
        patch.setenv(FUNCTIONS_VARIABLE, "gpu_functions:make_step")
        yield mine


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    functions = "gpu_functions:all_reduce,perf.step:make_step"
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    side = Side(root=folder, environment={"PYTHONPATH": path, FUNCTIONS_VARIABLE: functions})
    size = min(2, torch.cuda.device_count())
    with Pool(SetOptions(size=size, device="cuda", rounds=3, deadline_seconds=120), sides=[side]) as pool:
        yield pool


@pytest.mark.usefixtures("own_stream", "folder")
def test_captured_step_trains_like_the_eager_step() -> None:
    losses: dict[CallExecution, list[float]] = {}
    executions: tuple[CallExecution, ...] = ("eager", "graph")
    for execution in executions:
        spec = CustomStepSpec(
            function="gpu_functions:make_step", world_size=1, per_rank_batch_size=4, execution=execution
        )
        step = CustomStep(spec, rank=0, device=torch.device("cuda", 0))
        step.warm_up(11)
        losses[execution] = []
        for _ in range(8):
            step.step()
            losses[execution].append(step.loss.item())
        step.end_round(8)
    assert losses["graph"] == pytest.approx(losses["eager"], rel=1e-5)
    assert losses["eager"][-1] < losses["eager"][0], "it trains"


def test_written_example_is_measured(pool: Pool) -> None:
    world_size = min(2, torch.cuda.device_count())
    spec = CustomStepSpec(
        function="perf.step:make_step", world_size=world_size, per_rank_batch_size=32, execution="graph"
    )
    (seconds,) = pool.measure(spec).median_step_seconds().values()
    assert 0 < seconds < 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_own_all_reduce_is_checked_and_measured(pool: Pool) -> None:
    spec = CustomCollectiveSpec(
        function="gpu_functions:all_reduce", world_size=2, nbytes=2**20, execution="graph"
    )
    (seconds,) = pool.measure(spec).median_step_seconds().values()
    assert 0 < seconds < 0.01
