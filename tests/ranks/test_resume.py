"""Resumed runs equal uninterrupted ones; wrong checkpoints are refused."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ddpperf.errors import CannotTrain
from ddpperf.specs import CHECKPOINTS_VARIABLE
from ddpperf.training import checkpoint
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests.ranks.test_run import (
    CPU,
    DROPS,
    FIRST_SCALE,
    SMALL,
    learned,
    overflowing,
    parameters_of,
    require_same,
    run_of,
)


class Stopped(Exception):
    """Stands for the end of a killed run."""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"optimizer": "lars"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "lamb"}, marks=pytest.mark.slow),
        {"optimizer": "muon", "schedule": "cosine", "warmup_epochs": 1},
        {"grow_from": 4, "cutout": 4},
        {"average_weights": True, "cutmix": 0.5, "uncropped_epochs": 1},
        {"precision": "fp16", "optimizer": "lars"},
        DROPS,
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"epochs": 3, "optimizer": "sgd", "recompute_statistics": True, **fields}
    whole = run_of(**fields)
    whole.step()
    monkeypatch.setenv(CHECKPOINTS_VARIABLE, str(tmp_path))
    stopped = run_of(**fields)
    stopped.after_step = after(sum(stopped.spec.epoch_steps[:2]) + 1)
    with pytest.raises(Stopped):
        stopped.step()
    (kept,) = tmp_path.iterdir()
    assert kept.name == stopped.spec.id.replace(":", "_") + ".pt"
    resumed = run_of(**fields)
    resumed.step()
    assert resumed.finish()["resumed_epochs"] == 2
    require_same(parameters_of(whole), parameters_of(resumed))
    assert learned(whole) == learned(resumed)
    again = run_of(**fields)
    again.step()
    assert again.finish()["resumed_epochs"] == 3, "a finished run is not trained again"
    require_same(parameters_of(whole), parameters_of(again))


def test_a_resumed_run_goes_on_with_its_scaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All warm-up steps overflow, and so do the first steps of the training."""
    whole = overflowing(epochs=3)
    assert not whole.training.optimizer.state
    whole.step()
    monkeypatch.setenv(CHECKPOINTS_VARIABLE, str(tmp_path))
    stopped = overflowing(epochs=3)
    stopped.after_step = after(2 * stopped.spec.epoch_steps[0] + 1)
    with pytest.raises(Stopped):
        stopped.step()
    resumed = overflowing(epochs=3)
    resumed.step()
    assert resumed.finish()["resumed_epochs"] == 2
    require_same(parameters_of(whole), parameters_of(resumed))
    assert learned(whole) == learned(resumed)
    assert resumed.training.scaler.state_dict() == whole.training.scaler.state_dict()
    assert resumed.training.scaler.get_scale() < FIRST_SCALE


def after(steps: int) -> Any:
    left = iter(range(steps - 1))

    def stop() -> None:
        if next(left, None) is None:
            raise Stopped

    return stop


def test_only_the_first_round_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKPOINTS_VARIABLE, str(tmp_path))
    run = run_of()
    for _ in range(2):
        steps: list[int] = []
        run.after_step = lambda steps=steps: steps.append(1)  # type: ignore[misc]
        run.step()
        assert len(steps) == sum(run.spec.epoch_steps)
    assert run.finish()["resumed_epochs"] == 0
    resumed = run_of()
    resumed.step()
    assert resumed.finish()["resumed_epochs"] == 2
    told: list[float] = []
    resumed.report = told.append
    resumed.step()
    assert resumed.finish()["resumed_epochs"] == 0, "the second round trains the whole run"
    assert told
    assert all(0 <= share <= 1 for share in told)


def test_a_wrong_or_short_checkpoint_is_refused(tmp_path: Path) -> None:
    path, spec = tmp_path / "run.pt", {"model": "resnet18", "rate": 0.1}
    assert checkpoint.load(path, spec, CPU) is None
    checkpoint.save(path, spec, {"history": [{"loss": 1.0}]})
    assert checkpoint.load(path, spec, CPU) == {"history": [{"loss": 1.0}]}
    with pytest.raises(
        CannotTrain, match=r"run.pt is of another training: model 'resnet18', not 'vit'; remove it, or name"
    ):
        checkpoint.load(path, {"model": "vit", "rate": 0.1}, CPU)
    whole = path.read_bytes()
    for cut in (b"", whole[: len(whole) // 2], b"nothing like it"):
        path.write_bytes(cut)
        with pytest.raises(
            CannotTrain, match=r"run.pt has no checksum: it is cut short, or an older .*; remove it to start"
        ):
            checkpoint.load(path, spec, CPU)
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"], "nothing half-written stays"


def test_a_checkpoint_of_other_parameters_is_refused(tmp_path: Path) -> None:
    """The spec is the same, but the code of its model has changed."""
    kept, now = run_of(), run_of()
    kept.step()
    state: dict[str, Any] = {"model": kept.training.task.module.state_dict(), "optimizer": {}}
    del state["model"]["fc.bias"]
    with pytest.raises(
        CannotTrain, match=r"x.pt has other parameters than the model \(.*\); remove it, or name another$"
    ):
        checkpoint.restore(tmp_path / "x.pt", state, now.training.task.module, now.training.optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"average_weights": True, "buffer_sync": False}])
def test_ranks_resume_after_one_was_killed(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = dataclasses.replace(SMALL, world_size=2, strategy="ddp", per_rank_batch_size=8, epochs=8, **fields)
    with Pool(SetOptions(size=2, device="cpu", rounds=1, deadline_seconds=60)) as pool:
        (whole,) = pool.measure(two).samples
        monkeypatch.setenv(CHECKPOINTS_VARIABLE, str(tmp_path))
        pool.live_sets()[0].kill()  # its ranks were started without the folder
        ranks = [*pool.live_sets()[0].pids.values()]

        def kill_one_when_there_is_a_checkpoint() -> None:
            while not (tmp_path / f"{two.id}.pt").exists():
                time.sleep(0.001)
            os.kill(ranks[1], signal.SIGKILL)

        killer = threading.Thread(target=kill_one_when_there_is_a_checkpoint, daemon=True)
        killer.start()
        with pytest.raises(SetFailure, match="rank 1 of set A2 was killed by SIGKILL"):
            pool.measure(two)
        killer.join()
        (resumed,) = pool.measure(two).samples
    assert 1 <= resumed.counters["resumed_epochs"][0] == resumed.counters["resumed_epochs"][1] < two.epochs
    for name, values in whole.counters.items():
        if name.startswith(("train_loss", "train_accuracy", "test_loss", "test_accuracy")):
            assert resumed.counters[name] == values, name


@pytest.mark.slow
def test_ranks_with_different_checkpoints_are_refused(tmp_path: Path) -> None:
    """As on two nodes whose checkpoint folders have one name and are not one folder."""
    program = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from ddpperf.training.checkpoint import require_equal_epochs
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
require_equal_epochs(Path("x.pt"), 3, torch.device("cpu"))
require_equal_epochs(Path("x.pt"), 3 * (1 - rank), torch.device("cpu"))
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, printed = rank.communicate(timeout=60)
        assert printed.splitlines()[-1].partition("]: ")[2] == (
            "ddpperf.errors.CannotTrain: the checkpoint x.pt has 3 epochs on some ranks and 0 on others; "
            "let --checkpoints name a folder that all nodes share, or copy it to each node"
        )
