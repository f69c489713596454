"""Compiled steps train like eager ones, and compiling again in a round is an error."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from ddpperf.errors import CannotTrain
from ddpperf.machine.compiler import compiler_reason
from ddpperf.measuring.compile_and_capture import (
    compiled,
    forbid_compiling,
    forget_compiled,
    require_none_new,
)
from ddpperf.specs import FUNCTIONS_VARIABLE, Execution
from ddpperf.training import model_and_data
from tests.unit.test_step import training_step

needs_compiler = pytest.mark.skipif(bool(compiler_reason()), reason=compiler_reason() or "-")


def small_model(name: str) -> nn.Module:
    """Quickly compiled, and without a batch's statistics."""
    del name
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    return nn.Sequential(
        convolution, nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)
    )


def doubled(numbers: Tensor, times: int) -> Tensor:
    return numbers * times


def losses(execution: Execution, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return losses of epochs of 4 steps, with a rate so high that its changes show."""
    monkeypatch.setattr(model_and_data, "build", small_model)
    monkeypatch.setattr("ddpperf.training.schedules.PEAK_RATE", 0.5)
    fields: dict[str, Any] = {"input": "device", "epoch_images": 64, "accumulation_steps": 2}
    training = training_step(per_rank_batch_size=16, execution=execution, **fields)
    trajectory = []
    for _ in range(steps):
        training.step()
        trajectory.append(training.training.loss.item())
    assert training.startup_seconds.keys() == ({"compile_seconds"} if execution != "eager" else set())
    return trajectory


@needs_compiler
@pytest.mark.slow
def test_a_compiled_step_trains_like_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = losses("eager", 10, monkeypatch)
    assert losses("compile", 10, monkeypatch) == pytest.approx(eager, rel=1e-4)
    assert max(eager) - min(eager) > 0.1  # it learns, so that a wrong step would show


@needs_compiler
@pytest.mark.slow
def test_a_function_can_be_compiled_many_times() -> None:
    """torch by itself stops compiling a function after a few times, and runs it eagerly."""
    for times in range(2 * torch._dynamo.config.recompile_limit):
        compiled_frames = torch._dynamo.utils.counters["frames"]
        compiled_frames.clear()
        compiled(doubled, "")(torch.ones(times + 1), times)
        assert compiled_frames["ok"] == 1


@pytest.mark.slow
@needs_compiler
def test_compiling_again_after_the_warm_up_is_an_error() -> None:
    """It would be timed as a part of the step."""
    function = compiled(doubled, "")
    function(torch.ones(2), 1)
    forbid_compiling()
    assert function(torch.ones(2), 1).tolist() == [1, 1]
    again = r"compiled again in a timed round \(.*times.*\); if its control flow .*, use --executions eager$"
    with pytest.raises(CannotTrain, match=again):
        function(torch.ones(2), 2)
    forget_compiled()
    assert compiled(doubled, "")(torch.ones(3), 3).tolist() == [3, 3, 3]


@pytest.mark.slow
@needs_compiler
def test_compiling_new_code_after_the_warm_up_is_an_error() -> None:
    """Torch itself forbids only what was compiled before."""

    def branching(numbers: Tensor) -> Tensor:
        return numbers + 1 if numbers.sum() > 0 else numbers - 1

    function = compiled(branching, "")
    function(torch.ones(2))
    before = forbid_compiling()
    function(torch.ones(2))
    require_none_new(before)
    assert function(-torch.ones(2)).tolist() == [-2, -2]
    with pytest.raises(
        CannotTrain, match=r"compiled again in a timed round \(a part of it ran for the first time\); if its"
    ):
        require_none_new(before)
    forget_compiled()


@needs_compiler
def test_compiled_case_of_which_nothing_was_compiled_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    training = training_step(execution="compile")
    words = "torch.compile compiled no layer of the model: TORCHDYNAMO_DISABLE is set; unset it"
    with torch._dynamo.config.patch(disable=True), pytest.raises(CannotTrain, match=words):
        training.warm_up(1)


@needs_compiler
@pytest.mark.parametrize(("model", "compiles"), [("uncompiled", False), ("lazy", True)])
def test_compiled_loss_of_a_model_that_is_not_compiled_fails(
    model: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"tests.odd_models:{model}"
    monkeypatch.setenv(FUNCTIONS_VARIABLE, name)
    training = training_step(model=name, per_rank_batch_size=8, execution="compile")
    words = r"torch.compile compiled no layer of the model: .*torch\.compiler\.disable.*; use --executions"
    with contextlib.nullcontext() if compiles else pytest.raises(CannotTrain, match=words):
        training.warm_up(1)
    forget_compiled()
