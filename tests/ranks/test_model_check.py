"""The check of a model that is not built in: what is accepted, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, cast

import pytest
import torch

from ddpperf.data.cache import Data
from ddpperf.errors import Refused
from ddpperf.plugin.options.refused_options import MODEL_SECONDS, check_model
from ddpperf.specs import FUNCTIONS_VARIABLE, Precision, TrainingSpec
from ddpperf.specs.custom import TRAINED
from ddpperf.training.check_model import check
from ddpperf.training.measured_step import MeasuredStep
from ddpperf.training.step import TrainingStep
from tests.command_line import Read, reader

MODELS = """
import sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy

number = 3
print("models are being made", file=sys.stderr)

def batch(batch_size):
    return torch.randn(batch_size, 4), torch.randint(2, (batch_size,))

def good():
    return nn.Linear(4, 2), batch, lambda outputs, targets: 2 * cross_entropy(outputs, targets)

def frozen_in_part():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model, batch, cross_entropy

def unused_in_part():
    model = nn.Linear(4, 2)
    model.spare = nn.Linear(4, 2)
    return model, batch, cross_entropy

def sparse():
    def rows(batch_size):
        return torch.randint(9, (batch_size, 3)), torch.randint(2, (batch_size,))

    return nn.Sequential(nn.EmbeddingBag(9, 2, sparse=True)), rows, cross_entropy

class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(self.change(x))

def normalizing():
    model = InPlace(4, 2)
    model.change = lambda x: x.sub_(0.5).div_(0.5)
    return model, batch, cross_entropy

def rectifying():
    model = InPlace(4, 2)
    model.change = lambda x: x.relu_()
    return model, batch, cross_entropy

def compiled():
    return torch.compile(nn.Linear(4, 2)), batch, cross_entropy

def compiled_in_place():
    model = nn.Linear(4, 2)
    model.compile()
    return model, batch, cross_entropy

def raising():
    raise OSError("no weights here\\nnor there")
"""
NO_THREE = r"model \S+ must return .*, got {}; return the three$"
NO_BATCH = r"the batch maker of \S+ must return inputs and targets, two tensors of 2 rows, got {}$"
UNTRAINABLE = r"model \S+ cannot be trained on cpu in fp32 \({}\); train it"
# What a function of own_models returns, and the sentence that refuses it.
RETURNED = {
    "nn.Linear(4, 2)": NO_THREE.format("Linear"),
    "(nn.Linear(4, 2), batch, 0.5)": NO_THREE.format(r"\(Linear, function, float\)"),
    "(nn.Linear(4, 2), lambda n: batch(n)[0], cross_entropy)": NO_BATCH.format(r"Tensor \[2, 4\]"),
    "(nn.Linear(4, 2), lambda n: ([1.0], [0]), cross_entropy)": NO_BATCH.format(r"\(list, list\)"),
    "(nn.Linear(4, 2), lambda n: batch(3), cross_entropy)": NO_BATCH.format(
        r"\(Tensor \[3, 4\], Tensor \[3\]\)"
    ),
    "(nn.Linear(4, 2), batch, lambda o, t: o.sum() / 0)": UNTRAINABLE.format(
        r"FloatingPointError: the loss is (-?inf|nan) after a round of 1.*"
    ),
}
NAMED = {
    "nowhere.at_all:make": r"model nowhere\.at_all:make cannot be imported \(No module named 'nowhere'\)",
    "broken_models:make": r"model \S+ cannot be imported \(No module named 'nothing_like_it'\); try",
    "own_models:number": r"model \S+ cannot be found: own_models has no function number; name one of its",
    "own_models:raising": UNTRAINABLE.format("OSError: no weights here"),
    "own_models:normalizing": r"model \S+ changes its inputs in each step, and .*; leave them as they are",
    "own_models:compiled": r"model \S+ is compiled, so that .*; return it without torch.compile, and",
    "own_models:compiled_in_place": r"model \S+ is compiled, so that ",
    "own_models:sparse": r"model \S+ has sparse gradients, such as that of 0\.weight, which ddpperf's SGD",
    "torchvision:resnet999": r"model torchvision:resnet999 is not in torchvision; name one of its models",
}


@pytest.fixture
def read(pytestconfig: pytest.Config) -> Read:
    """Return the options with a model, and batches of 2 rows."""
    return partial(reader(pytestconfig), "--batch-sizes", "2", "--model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a module of models, from which they can be imported here, too."""
    folder = tmp_path_factory.mktemp("models")
    made = "".join(f"\ndef made_{number}():\n    return {text}\n" for number, text in enumerate(RETURNED))
    (folder / "own_models.py").write_text(MODELS + made)
    (folder / "broken_models.py").write_text("import nothing_like_it\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [*NAMED.items(), *((f"own_models:made_{n}", text) for n, text in enumerate(RETURNED.values()))],
)
def test_untrainable_model_is_refused(
    folder: Path, name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FUNCTIONS_VARIABLE, name)
    with pytest.raises(ValueError, match=f"^{sentence}") as refusal:
        check(name, 2)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    [
        *("own_models:good", "own_models:frozen_in_part", "own_models:unused_in_part"),
        *("own_models:rectifying", "resnet18_cifar"),
    ],
)
def test_trainable_model_is_accepted(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUNCTIONS_VARIABLE, name)
    check(name, 2)


def test_a_step_uses_the_models_batch_and_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUNCTIONS_VARIABLE, "own_models:good")
    spec = TrainingSpec(model="own_models:good", world_size=1, per_rank_batch_size=3, strategy="single")
    steps = [TrainingStep(spec, rank=rank, device=torch.device("cpu")) for rank in (0, 0, 1)]
    (inputs, targets), again, of_other_rank = (step.input.take() for step in steps)
    assert inputs.shape == (3, 4)
    assert torch.equal(inputs, again[0])
    assert not torch.equal(inputs, of_other_rank[0])
    first, _, other = (next(step.model.parameters()) for step in steps)
    assert torch.equal(first, other), "all ranks have the same start"
    expected = 2 * torch.nn.functional.cross_entropy(steps[0].model(inputs), targets).item()
    MeasuredStep(steps[0]).step()
    assert steps[0].loss.item() == pytest.approx(expected)


def test_a_torchvision_model_can_be_checked() -> None:
    pytest.importorskip("torchvision")
    check("torchvision:mobilenet_v3_small", 2)
    cannot = (
        r"^model torchvision:alexnet cannot be trained on cpu in .*; the images are 32x32: name another model"
    )
    with pytest.raises(ValueError, match=cannot):
        check("torchvision:alexnet", 2)


def test_model_is_checked_with_the_runs_images(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AlexNet needs more than 32x32 pixels."""
    pytest.importorskip("torchvision")
    images = torch.zeros(4, 3, 64, 64, dtype=torch.uint8)
    torch.save({"train_images": images, "train_labels": torch.arange(4)}, path := tmp_path / "images.pt")
    data = Data(name="imagefolder", path=path, digest="0" * 12, train_images=4, image_size=(64, 64))

    def run_child(command: list[str], variables: dict[str, str], _: float) -> CompletedProcess[str]:
        name, batch_size, device, precision, kind, digest, count = command[3:]
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        fields: dict[str, Any] = {"data": kind, "digest": digest, "epoch_images": int(count)}
        check(name, int(batch_size), device, cast(Precision, precision), **fields)
        return CompletedProcess(command, 0, TRAINED, "")

    monkeypatch.setattr("ddpperf.plugin.options.refused_options.run_child", run_child)
    check_model(dataclasses.replace(read("torchvision:alexnet"), data=data))


def test_model_is_checked_in_a_process(folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    sentence = r"^--model: model own_models:raising cannot be trained on cpu in fp32 \(OSError: no"
    with pytest.raises(Refused, match=sentence) as refusal:
        check_model(read("own_models:raising"))
    assert "\n" not in str(refusal.value)
    assert FUNCTIONS_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("ended", "sentence"),
    [
        (
            CompletedProcess([], 3, "", "a\nb"),
            "--model own_models:good ended its process with status 3; train it",
        ),
        (
            CompletedProcess([], 0, "", ""),  # its code has called os._exit(0)
            "--model own_models:good ended its process with status 0; train it",
        ),
        (None, "--model own_models:good trained no step in 120 s; train it without ddpperf"),
    ],
)
def test_failed_check_is_refused_with_one_sentence(
    read: Read, ended: CompletedProcess[str] | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_child(command: list[str], *_: object) -> CompletedProcess[str]:
        if ended is None:
            raise subprocess.TimeoutExpired(command, MODEL_SECONDS)
        return ended

    monkeypatch.setattr("ddpperf.plugin.options.refused_options.run_child", run_child)
    with pytest.raises(Refused, match=f"^{re.escape(sentence)}"):
        check_model(read("own_models:good"))


def test_built_in_models_are_not_checked(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    check_model(read("resnet18"))
