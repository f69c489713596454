"""Whole trainings on a GPU: captured runs learn, grow and repeat."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from ddpperf.specs import Execution, RunSpec
from ddpperf.training.whole_training import TrainingRun
from tests.gpu.shared import GPU

pytestmark = pytest.mark.usefixtures("own_stream")

SPEC = RunSpec(
    world_size=1,
    per_rank_batch_size=32,
    strategy="single",
    input="device",
    model="resnet10_cifar",
    memory_format="channels_last",
    epoch_images=256,
    test_images=128,
    epochs=3,
    rate=0.05,
    warmup_epochs=1,
    recompute_statistics=True,
)


def trained(**fields: Any) -> TrainingRun:
    run = TrainingRun(replace(SPEC, **fields), rank=0, device=GPU)
    run.warm_up(2)
    run.step()
    return run


def losses(run: TrainingRun, epoch: int) -> list[float]:
    first = sum(run.spec.epoch_steps[: epoch - 1])
    return run.record.losses[first : first + run.spec.epoch_steps[epoch - 1]].tolist()


EVERYTHING = {"label_smoothing": 0.1, "cutmix": 0.3, "average_weights": True}
PLAIN = {"schedule": "constant", "warmup_epochs": 0, "recompute_statistics": False, "may_diverge": True}
PLAIN |= {"nesterov": False, "decay_vectors": True}


@pytest.mark.parametrize(
    ("execution", "fields"),
    [
        ("graph", EVERYTHING),
        ("graph", EVERYTHING | {"optimizer": "muon"}),
        pytest.param("graph", EVERYTHING | {"optimizer": "lars", "rate": 2.0}, marks=pytest.mark.slow),
        pytest.param("compile+graph", EVERYTHING | {"optimizer": "muon"}, marks=pytest.mark.slow),
        ("graph", PLAIN | {"accumulation_steps": 4}),
        ("graph", PLAIN | {"clip_norm": 1.0, "schedule": "one_cycle"}),
    ],
)
def test_every_execution_learns_like_the_eager_one(execution: Execution, fields: dict[str, Any]) -> None:
    eager, other = (trained(execution=each, **fields) for each in ("eager", execution))
    assert losses(other, 1) == pytest.approx(losses(eager, 1), rel=2e-2)
    late = losses(other, 3)
    assert min(mean(late), late[-1]) < losses(other, 1)[0]
    if "cutmix" in fields:
        accuracies = [run.history[-1]["test_accuracy"] for run in (eager, other)]
        assert accuracies[1] == pytest.approx(accuracies[0], abs=0.2)


def test_a_diverging_training_ends_in_a_graph() -> None:
    run = trained(execution="graph", rate=1e3, nesterov=False, weight_decay=1.0, may_diverge=True)
    assert "test_loss" not in run.history[-1]
    assert 0 <= run.history[-1]["test_accuracy"] < 0.4


@pytest.mark.parametrize(
    ("execution", "clip_norm"),
    [("eager", 0.0), ("graph", 0.5), pytest.param("compile+graph", 0.5, marks=pytest.mark.slow)],
)
def test_fp16_skips_overflowing_steps_and_repeats(execution: Execution, clip_norm: float) -> None:
    """A CUDA graph must read the scale, and count skipped steps, at each replay."""
    fields: dict[str, Any] = {"precision": "fp16", "execution": execution, "clip_norm": clip_norm}
    run = TrainingRun(replace(SPEC, **fields), rank=0, device=GPU)
    run.start_scaler["scale"] = 2.0**24
    run.warm_up(2)
    rounds = []
    for _ in range(2):
        run.step()
        skipped = sum(epoch["skipped_steps"] for epoch in run.history)
        assert 0 < skipped < sum(run.spec.epoch_steps) / 2
        assert run.training.scaler.get_scale() == 2.0 ** (24 - skipped)
        rounds.append(losses(run, 3))
    assert rounds[1] == pytest.approx(rounds[0], rel=5e-2)
    assert losses(run, 3)[-1] < losses(run, 1)[0]


def test_a_growing_batch_has_a_graph_per_size() -> None:
    eager, captured = (trained(execution=execution, grow_from=8) for execution in ("eager", "graph"))
    assert set(captured.steps) == {8, 16, 32}
    # Rounding has grown beyond the tolerance after some 20 steps of 8 images.
    assert losses(captured, 1)[:16] == pytest.approx(losses(eager, 1)[:16], rel=2e-2)
    assert captured.history[-1]["train_loss"] == pytest.approx(eager.history[-1]["train_loss"], rel=0.3)


def test_a_captured_run_repeats_with_dropout() -> None:
    pytest.importorskip("torchvision")
    whole = trained(execution="graph", model="torchvision:squeezenet1_1", rate=0.005)
    first = losses(whole, 3)
    whole.step()
    assert losses(whole, 3) == pytest.approx(first, rel=5e-2), "from the same start, at the same addresses"
