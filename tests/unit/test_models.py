"""The built-in ResNets equal torchvision's bit for bit; torchvision's models by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from ddpperf.specs import Model
from ddpperf.training.models import MODELS, Stem, build

PUBLISHED = [name for name in MODELS if name != "resnet10_cifar"]  # a small one of our own
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def torchvision_model(name: str) -> nn.Module:
    """Return torchvision's model; for a CIFAR model with the stem and the classes replaced."""
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
    """Change every vector of the model: equal BatchNorms would hide swapped ones."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point() and value.dim() == 1:
                value.add_(torch.rand(value.shape, generator=generator), alpha=0.1)
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", PUBLISHED)
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


@pytest.mark.parametrize("name", ["resnet18", "resnet50_cifar"])
def test_gradients_equal_torchvisions(name: Model) -> None:
    ours, theirs = MODELS[name](), torchvision_model(name)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for model in (ours, theirs):
        model(IMAGES).square().mean().backward()
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (ours, theirs)]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_initial_parameters_equal_torchvisions(name: Model) -> None:
    pytest.importorskip("torchvision")
    torch.manual_seed(0)
    ours = MODELS[name]().state_dict()
    torch.manual_seed(0)
    theirs = torchvision_model(name).state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def test_stem_by_matrix_product_is_the_convolution() -> None:
    stem, images = Stem(16).double(), torch.randn(2, 3, 5, 7, dtype=torch.float64)
    product, convolved = stem.by_matrix_product(images), stem(images)
    assert product.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(product, convolved)
    weights = torch.randn_like(convolved)
    gradients = [torch.autograd.grad((out * weights).sum(), stem.weight) for out in (product, convolved)]
    torch.testing.assert_close(*gradients)


# --- torchvision's own


def test_a_torchvision_model_is_built_by_name() -> None:
    models: Any = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    ours = build("torchvision:mobilenet_v3_small")
    torch.manual_seed(0)
    theirs = models.mobilenet_v3_small()
    assert type(ours) is type(theirs)
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items()), (
        "random weights"
    )
    assert ours(IMAGES).shape == (2, 1000)


@pytest.mark.parametrize("name", ["mobilnet_v3_small", "fasterrcnn_resnet50_fpn"])  # it classifies no images
def test_an_unknown_model_is_refused(name: str) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(ValueError, match=rf"^model torchvision:{name} is not in torchvision; name one"):
        build(f"torchvision:{name}")


def test_without_torchvision_only_built_in_models_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with torch.device("meta"):
        build("resnet18")
    with pytest.raises(
        ValueError,
        match=r"^model torchvision:vit_b_16 needs torchvision, which is not installed; install it$",
    ):
        build("torchvision:vit_b_16")
