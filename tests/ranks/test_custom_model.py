"""Custom models: they train, and every mistake in them is one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddpperf.specs import FUNCTIONS_VARIABLE, TrainingSpec
from ddpperf.training.check_model import check
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.step import TrainingStep

Name = Callable[[str], str]

# What a user writes; each test changes a line.
SOURCE = """
import torch

def batch(size):
    return torch.randn(size, 5), torch.randn(size, 1)

def model():
    return torch.nn.Linear(5, 1), batch, torch.nn.functional.mse_loss
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Name:
    """Return a function that writes a custom model's module and requests the model."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str, function: str = "model") -> str:
        package = tmp_path / "mine"
        package.mkdir(exist_ok=True)
        module = f"own_{os.path.basename(tmp_path)}_{len(list(package.iterdir()))}"
        (package / f"{module}.py").write_text(source)
        name = f"mine.{module}:{function}"
        monkeypatch.setenv(FUNCTIONS_VARIABLE, name)
        for imported in [each for each in sys.modules if each == "mine" or each.startswith("mine.")]:
            monkeypatch.delitem(sys.modules, imported)
        return name

    return write


def test_a_step_uses_the_models_batch_and_loss(named: Name) -> None:
    name = named(SOURCE)
    spec = TrainingSpec(model=name, world_size=1, per_rank_batch_size=3, strategy="single")
    steps = [TrainingStep(spec, rank=rank, device=torch.device("cpu")) for rank in (0, 0, 1)]
    batches = [step.task.input.take() for step in steps]
    assert batches[0][0].shape == (3, 5)
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], batches[2][0]), "each rank has a batch of its own"
    assert all(torch.equal(*map(first_weight, (step, steps[0]))) for step in steps), "and the same start"
    inputs, targets = batches[0]
    expected = (steps[0].model(inputs) - targets).square().mean().item()
    MeasuredStep(steps[0]).step()
    assert steps[0].loss.item() == pytest.approx(expected)


def first_weight(step: TrainingStep) -> Tensor:
    return next(step.model.parameters())


def test_a_torchvision_model_can_be_checked() -> None:
    pytest.importorskip("torchvision")
    check("torchvision:mobilenet_v3_small", 2)
    with pytest.raises(
        ValueError, match=r"^model torchvision:alexnet cannot be trained \(.*; try it by itself first$"
    ):
        check("torchvision:alexnet", 2)
