"""Slow-downs that are put into one side from outside are named, on real process sets of both sides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpperf.specs import EpochSpec, RunSpec, TrainingSpec
from ddpperf.why import explain
from ddpperf.why.explain import Slower
from ddpperf.why.lines import rows_of
from ddpperf.why.sweep import BETWEEN, steps_of
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from tests.generated import RECIPE

SPEC = TrainingSpec(model="resnet10_cifar", world_size=2, per_rank_batch_size=2, strategy="ddp")
PATCH = """
import sys, threading, time

def patch():
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import SGD
    {patch}

class Finder:  # patches when the rank's commands are imported, after torch
    def find_spec(self, name, path=None, target=None):
        if name == "ddpperf.workers.rank_commands":
            sys.meta_path.remove(self)
            patch()

sys.meta_path.insert(0, Finder())
"""
BURN = """
    def burn():
        end = time.perf_counter() + 0.03
        while time.perf_counter() < end:
            sum(range(2000))  # fewer calls, or the trace would exceed 64 MiB
    update = SGD.step
    def step(self, *arguments):
        burn()
        return update(self, *arguments)
    SGD.step = step
"""
BUCKETS = """
    usual = DistributedDataParallel.__init__
    def begin(self, module, **options):
        usual(self, module, **options | {"bucket_cap_mb": 0.05})
    DistributedDataParallel.__init__ = begin
"""


def reasons(
    tmp_path: Path, patch: str = "", *, spec: TrainingSpec = SPEC, candidate: TrainingSpec | None = None
) -> Any:
    """Why the candidate, whose ranks are patched, is slower than the base."""
    (tmp_path / "sitecustomize.py").write_text(PATCH.format(patch=patch.strip()))
    side = Side(name="B", environment={"PYTHONPATH": str(tmp_path)} if patch else {})
    options = SetOptions(size=2, device="cpu", rounds=1, deadline_seconds=60)
    slower = [Slower(tests=["perf/test_it.py::test_a[2]"], spec=spec, candidate=candidate, seconds=0.5)]
    with Pool(options, sides=[Side(), side]) as pool:
        (found,) = explain.explain(pool, slower, tmp_path / "traces" / "now", lambda stage: None)
    return found


def test_burnt_time_and_smaller_buckets_are_named(tmp_path: Path) -> None:
    found = reasons(tmp_path, f"{BURN.strip()}\n{BUCKETS}")
    assert found["function"].startswith("burn (")
    change = found["step"]["candidate"] - found["step"]["base"]
    (row,) = (row for row in found["rows"] if [*row["path"]] == [BETWEEN, "optimizer"])
    assert row["clear"]
    assert row["candidate"] - row["base"] > 0.02, "of 0.03 s; another program may take more of this time"
    assert sum(row["candidate"] - row["base"] for row in found["rows"]) + found[
        "unexplained"
    ] == pytest.approx(change)
    sides = [steps_of(json.loads(Path(trace).read_bytes())["traceEvents"]) for trace in found["traces"]]
    assert [bool(steps) for steps in sides] == [True, True], "the raw trace of each side is kept"
    assert len(list((tmp_path / "traces" / "now").iterdir())) == 2
    (base, base_bytes), (candidate, candidate_bytes) = found["messages"]["gradients"]
    assert candidate >= 3 * base
    assert candidate_bytes == base_bytes
    assert f"gradients {base} -> {candidate} messages" in rows_of(found)[1]


@pytest.mark.slow
def test_steps_of_an_epoch_without_loader_workers_wait_for_images(tmp_path: Path) -> None:
    epoch = EpochSpec(
        model="resnet10_cifar",
        world_size=1,
        per_rank_batch_size=64,
        strategy="single",
        input="dataloader",
        loader_workers=1,
        epoch_images=512,
    )
    found = reasons(tmp_path, spec=epoch, candidate=replace(epoch, loader_workers=0))
    assert any("DataLoader" in row for row in rows_of(found)), found["rows"][:3]


def test_whole_trainings_are_not_traced(tmp_path: Path) -> None:
    training = RunSpec(**RECIPE)
    assert "too long to trace" in reasons(tmp_path, spec=training)["problem"]


def test_traces_of_the_newest_runs_stay(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"run{number}").mkdir()
    explain._keep_newest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run{number}" for number in range(2, 7)]
