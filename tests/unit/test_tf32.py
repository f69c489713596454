"""TF32 is used on request only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddpperf.specs import Precision
from ddpperf.training.models import MODELS
from ddpperf.training.step import allow_tf32
from tests.unit.test_step import training_step


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(MODELS, "resnet18", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)))
    yield
    allow_tf32(False)


@pytest.mark.parametrize(("precision", "computed_in"), [("tf32", "tf32"), ("fp32", "ieee")])
def test_tf32_is_used_on_request_only(precision: Precision, computed_in: str) -> None:
    backends: Any = torch.backends
    before = "ieee" if computed_in == "tf32" else "tf32"
    backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = before
    training_step(precision=precision)
    assert backends.cudnn.conv.fp32_precision == backends.cuda.matmul.fp32_precision == computed_in


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 is a GPU's; found none, run this on one")
def test_convolutions_on_a_gpu_are_as_exact_as_float32() -> None:
    backends: Any = torch.backends
    images = torch.randn(32, 64, 32, 32, device="cuda")
    weights = torch.randn(64, 64, 3, 3, device="cuda")
    exact = torch.nn.functional.conv2d(images.double(), weights.double())

    def error() -> float:
        difference = torch.nn.functional.conv2d(images, weights) - exact
        return float(difference.norm() / exact.norm())

    backends.cudnn.conv.fp32_precision = "tf32"
    assert error() > 1e-4
    allow_tf32(False)
    assert error() < 1e-6
