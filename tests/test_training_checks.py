"""What training checks: equal parameters on all ranks, bit for bit, and an output for each class of the data set."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.data import Images, synthetic_images
from ddpperf.models import MODELS
from ddpperf.specs import DATA_VARIABLE, TrainingSpec
from ddpperf.training import TrainingStep, require_classifier, require_equal_parameters

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Peer:
    """Stands for the other rank of two: `all_reduce` meets its parameters, in the order in which they are asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._bits = [parameter.detach().contiguous().view(-1).view(torch.uint8) for parameter in model.parameters()]
        self._asked = 0

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        bits = self._bits[self._asked // 2]  # a least and a greatest of each
        self._asked += 1
        tensor.copy_({dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}[op](tensor, bits))


class Mixed(nn.Module):
    """Parameters of every kind of shape and type that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.short = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.long = nn.Parameter(torch.randn(2, 3, dtype=torch.float64).t())
        self.none = nn.Parameter(torch.empty(0))


def test_equal_parameters_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mixed()
    monkeypatch.setattr(dist, "all_reduce", Peer(copy.deepcopy(model)).all_reduce)
    require_equal_parameters(model)


@pytest.mark.parametrize("name", ["linear.weight", "linear.bias", "conv.weight", "scale", "short", "long"])
@pytest.mark.parametrize("towards", [math.inf, -math.inf])
def test_parameters_that_differ_in_one_bit_are_found(name: str, towards: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mixed()
    other = copy.deepcopy(model)
    with torch.no_grad():
        parameter = other.get_parameter(name)
        last = tuple(size - 1 for size in parameter.shape)
        parameter[last] = torch.nextafter(parameter[last], torch.tensor(towards, dtype=parameter.dtype))
    for ours, theirs in ((model, other), (other, model)):  # every rank finds it
        monkeypatch.setattr(dist, "all_reduce", Peer(theirs).all_reduce)
        with pytest.raises(RuntimeError, match=rf"parameter {name} differs between ranks after training"):
            require_equal_parameters(ours)


@pytest.mark.usefixtures("group")
def test_nan_parameters_with_equal_bits_are_equal() -> None:
    """What a NaN means is the loss' affair; here only a difference between ranks is."""
    model = Mixed()
    with torch.no_grad():
        model.get_parameter("linear.bias").fill_(math.nan)
    require_equal_parameters(model)


def small_image_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(900, 10))


def test_a_data_set_of_more_classes_than_the_model_has_outputs_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU a label beyond the outputs would end the process."""
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    spec = TrainingSpec(world_size=1, per_rank_batch_size=4, strategy="single", epoch_images=32, data="mine")
    for classes in (10, 11):
        labels = torch.arange(32) % classes
        torch.save({"train_images": torch.zeros(32, 3, 32, 32, dtype=torch.uint8), "train_labels": labels}, tmp_path / "x.pt")
        monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "x.pt"))
        if classes == 10:
            TrainingStep(spec, rank=0, device=CPU)
    with pytest.raises(ValueError, match=r"^model resnet18 has 10 outputs, the data set 11 classes; name another model$"):
        TrainingStep(spec, rank=0, device=CPU)


def test_looking_at_a_models_outputs_leaves_it_as_it_was() -> None:
    model = small_image_model()
    before = copy.deepcopy(model.state_dict())
    require_classifier("small", model, Images(pixels=synthetic_images(8).pixels, labels=torch.tensor([9])), CPU)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
