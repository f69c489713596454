"""Our ResNets beside torchvision's: the same parameters, the same start, and the same outputs to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpperf.models import MODELS
from ddpperf.specs import Model
from tests.strategies import one_thread

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


_one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)


def torchvision_model(name: str) -> nn.Module:
    """torchvision's model of our name; for a CIFAR form, torchvision's with the stem and the classes replaced."""
    models: Any = pytest.importorskip("torchvision").models
    if not name.endswith("_cifar"):
        plain: nn.Module = getattr(models, name)()
        return plain
    model: Any = getattr(models, name.removesuffix("_cifar"))(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    changed: nn.Module = model
    return changed


def randomized(model: nn.Module) -> nn.Module:
    """The model with every vector away from its start: BatchNorms that are all alike would hide a swapped one."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point() and value.dim() == 1:
                value.add_(torch.rand(value.shape, generator=generator), alpha=0.1)
    return model


@pytest.mark.parametrize(
    ("name", "count"), [("resnet18", 11_689_512), ("resnet18_cifar", 11_173_962), ("resnet50_cifar", 23_520_842)]
)
def test_parameter_counts_are_the_published_ones(name: Model, count: int) -> None:
    assert sum(parameter.numel() for parameter in MODELS[name]().parameters()) == count


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_equal_torchvisions(name: Model, training: bool) -> None:
    theirs = randomized(torchvision_model(name)).train(training)
    ours = MODELS[name]().train(training)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    with torch.no_grad():
        outputs = ours(IMAGES)
        assert outputs.isfinite().all()
        assert torch.equal(outputs, theirs(IMAGES))
    state = ours.state_dict()  # after a training forward: the running statistics moved alike
    assert all(torch.equal(state[key], value) for key, value in theirs.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_torchvision_loads_our_state_dict(name: Model) -> None:
    ours, theirs = randomized(MODELS[name]()), torchvision_model(name)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_gradients_equal_torchvisions() -> None:
    theirs = torchvision_model("resnet18")
    ours = MODELS["resnet18"]()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for model in (ours, theirs):
        model(IMAGES).square().mean().backward()
    for (key, our), (_, their) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert our.grad is not None
        assert their.grad is not None
        assert torch.equal(our.grad, their.grad), key


def test_the_start_equals_torchvisions() -> None:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    ours = MODELS["resnet18"]().state_dict()
    torch.manual_seed(0)
    theirs = torchvision_model("resnet18").state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def test_the_cifar_stem_keeps_the_resolution() -> None:
    model: Any = MODELS["resnet18_cifar"]()
    stem = model.maxpool(model.conv1(IMAGES))
    assert stem.shape == (2, 64, 32, 32)
    assert model(IMAGES).shape == (2, 10)
