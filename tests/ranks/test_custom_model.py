"""Custom models: they train, and every mistake in them is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddpperf.specs import FUNCTIONS_VARIABLE, EpochSpec, TrainingSpec
from ddpperf.training.check_model import check
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.models import custom_model
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
RETURN = "return torch.nn.Linear(5, 1), batch, torch.nn.functional.mse_loss"
BATCH = "return torch.randn(size, 5), torch.randn(size, 1)"


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


def test_a_custom_model_is_its_functions_result(named: Name) -> None:
    module, make_batch, loss = custom_model(named(SOURCE))
    assert isinstance(module, nn.Linear)
    assert [tuple(part.shape) for part in make_batch(7)] == [(7, 5), (7, 1)]
    assert loss(torch.ones(2, 1), torch.zeros(2, 1)).item() == 1


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


def test_an_epoch_repeats_the_models_batch(named: Name) -> None:
    name = named(SOURCE)
    spec = EpochSpec(model=name, world_size=1, per_rank_batch_size=3, strategy="single", epoch_images=30)
    epoch = TrainingEpoch(MeasuredStep(TrainingStep(spec, rank=0, device=torch.device("cpu"))))
    epoch.step()
    assert epoch.training.steps == 10


def first_weight(step: TrainingStep) -> Tensor:
    return next(step.model.parameters())


WRONG = [
    (RETURN, "return None",
     "must return (module, batch maker, loss), got a value of type NoneType; return the three"),
    (RETURN, "return torch.nn.Linear(5, 1)",
     "must return (module, batch maker, loss), got a value of type Linear;"),
    (RETURN, "return ()", "got a tuple of nothing;"),
    (RETURN, "return torch.nn.Linear(5, 1), batch", "got a tuple of Linear, function; return the three"),
    (RETURN, "return [torch.nn.Linear(5, 1), batch, batch]", "got a value of type list;"),
    (RETURN, "return torch.sum, batch, batch",
     "got a tuple of builtin_function_or_method, function, function;"),
    (RETURN, "return torch.nn.Linear, batch, batch", "got a tuple of type, function, function;"),
    (RETURN, "return torch.nn.Linear(5, 1), (1, 2), batch", "got a tuple of Linear, tuple, function;"),
    (RETURN, "return torch.nn.Linear(5, 1), batch, 0.5", "got a tuple of Linear, function, float;"),
    ("def model():", "model = 3\ndef other():", "cannot be found: mine.{module} has no function model;"),
    ("def model():", "def other():",
     "cannot be found: mine.{module} has no function model; name one of its functions"),
    ("import torch", "import torch, no_such_thing",
     "cannot be imported (No module named 'no_such_thing'); try python -c"),
    (BATCH, "return torch.randn(size, 5)",
     "must return (inputs, targets), got a value of type Tensor; return tensors"),
    (BATCH, "return torch.randn(size, 5), 1",
     "must return (inputs, targets), got a tuple of Tensor, int; return tensors"),
    (BATCH, "return (torch.randn(size, 5),) * 3", "got a tuple of Tensor, Tensor, Tensor;"),
    (BATCH, "return torch.randn(4, 5), torch.randn(4, 1)",
     "asked for 2 rows, got shapes (4, 5) and (4, 1); return as many"),
    (BATCH, "return torch.randn(size, 5), torch.randn(1)",
     "was asked for 2 rows, got shapes (2, 5) and (1,);"),
    (BATCH, "return torch.randn(size, 5), torch.tensor(1.)",
     "was asked for 2 rows, got shapes (2, 5) and ();"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "instead", "sentence"), WRONG)
def test_a_wrong_model_is_refused(named: Name, line: str, instead: str, sentence: str) -> None:
    assert line in SOURCE
    name = named(SOURCE.replace(line, instead))
    with pytest.raises(ValueError, match=r"^(model|the batch maker of) mine\.") as refusal:
        check(name, 2)
    module = name.removeprefix("mine.").removesuffix(":model")
    assert sentence.replace("{module}", module) in str(refusal.value)
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("line", "instead", "sentence"),
    [
        (
            RETURN,
            "return torch.nn.Linear(6, 1), batch, batch",
            "mat1 and mat2 shapes cannot be multiplied (2x5 and 6x1)); try",
        ),
        (RETURN, "raise RuntimeError('first\\nsecond')", "(RuntimeError: first)"),
        (RETURN, "raise ValueError", "(ValueError: no message)"),
        (RETURN, "raise OSError('no disk')", "(OSError: no disk); try it by itself first"),
        ("import torch", "import torch as", "(SyntaxError: "),
        (
            RETURN,
            "return torch.nn.ReLU(), batch, torch.nn.functional.mse_loss",
            "(ValueError: optimizer got an empty parameter",
        ),
        (
            RETURN,
            RETURN.replace("torch.nn.functional.mse_loss", "lambda out, _: 0.5"),
            "(AttributeError: 'float' object has no",
        ),
        (
            RETURN,
            RETURN.replace("torch.nn.functional.mse_loss", "lambda out, _: out.sum() / 0"),
            "the loss is",
        ),
    ],
)
def test_an_untrainable_model_is_refused(named: Name, line: str, instead: str, sentence: str) -> None:
    name = named(SOURCE.replace(line, instead))
    with pytest.raises(
        ValueError, match=rf"^model {name} cannot be trained \(.*; try it by itself first$"
    ) as refusal:
        check(name, 2)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize("environment", [None, "mine.other:model", "mine.other:model,mine:model"])
def test_only_the_requested_model_is_imported(
    named: Name, environment: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = named("raise SystemExit('it was imported')")
    if environment is None:
        monkeypatch.delenv(FUNCTIONS_VARIABLE)
    else:
        monkeypatch.setenv(FUNCTIONS_VARIABLE, environment)
    with pytest.raises(
        ValueError, match=rf"^model {name} was not named when the ranks started; .* pass --model {name} "
    ):
        custom_model(name)


def test_a_missing_module_is_refused(named: Name, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUNCTIONS_VARIABLE, "no_such_module:model")
    with pytest.raises(
        ValueError,
        match=r"^model no_such_module:model cannot be imported \(No module named 'no_such_module'\);",
    ):
        custom_model("no_such_module:model")


def test_a_torchvision_model_can_be_checked() -> None:
    pytest.importorskip("torchvision")
    check("torchvision:mobilenet_v3_small", 2)
    with pytest.raises(
        ValueError, match=r"^model torchvision:alexnet cannot be trained \(.*; try it by itself first$"
    ):
        check("torchvision:alexnet", 2)


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        (SOURCE, 0, ""),
        (
            SOURCE.replace(RETURN, "return None"),
            1,
            "must return (module, batch maker, loss), got a value of type NoneType;",
        ),
    ],
    ids=["good", "wrong"],
)
def test_the_check_prints_one_line(named: Name, source: str, status: int, said: str) -> None:
    name = named(source)
    path = os.pathsep.join([sys.path[0], str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "ddpperf.training.check_model", name, "2"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (status, "" if status else "trained\n")
    assert len(done.stderr.splitlines()) == status
    assert said in done.stderr
