"""What training checks and counts: equal parameters, a finite loss, classes, CPU seconds."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.data.images import Images, synthetic_images
from ddpperf.errors import CannotTrain
from ddpperf.specs import FUNCTIONS_VARIABLE, EpochSpec, TrainingSpec
from ddpperf.specs.training_step import DATA_VARIABLE, CommHook, Strategy
from ddpperf.training import model_and_data
from ddpperf.training.epoch import TrainingEpoch
from ddpperf.training.measured_step import MeasuredStep, sent_bytes
from ddpperf.training.model_and_data import require_classifier
from ddpperf.training.models import MODELS
from ddpperf.training.step import TrainingStep
from ddpperf.training.strategies import require_equal_parameters
from tests.odd_models import ODD_MODELS, set_by_first_batch

CPU = torch.device("cpu")


class Peer:
    """A stand-in for the other of two ranks, whose `all_reduce` has its own parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._bits = [each.detach().contiguous().view(-1).view(torch.uint8) for each in model.parameters()]
        self._asked = 0

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        bits = self._bits[self._asked // 2]  # a least and a greatest of each
        self._asked += 1
        tensor.copy_({dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}[op](tensor, bits))


class Mixed(nn.Module):
    """A model with parameters of many shapes and types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.short = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.long = nn.Parameter(torch.randn(2, 3, dtype=torch.float64).t())
        self.none = nn.Parameter(torch.empty(0))


@pytest.mark.parametrize("name", ["linear.weight", "linear.bias", "conv.weight", "scale", "short", "long"])
@pytest.mark.parametrize("towards", [math.inf, -math.inf])
def test_parameters_that_differ_in_one_bit_are_found(
    name: str, towards: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mixed()
    other = copy.deepcopy(model)
    with torch.no_grad():
        parameter = other.get_parameter(name)
        last = tuple(size - 1 for size in parameter.shape)
        parameter[last] = torch.nextafter(parameter[last], torch.tensor(towards, dtype=parameter.dtype))
    for ours, theirs in ((model, other), (other, model)):  # every rank finds it
        monkeypatch.setattr(dist, "all_reduce", Peer(theirs).all_reduce)
        with pytest.raises(RuntimeError, match=rf"parameter {name} differs between ranks after training"):
            require_equal_parameters(ours, TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp"))


def test_parameter_that_the_model_sets_by_its_first_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUNCTIONS_VARIABLE, name := ODD_MODELS["set_by_first_batch"])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    spec = TrainingSpec(model=name, world_size=2, per_rank_batch_size=2, strategy="ddp")
    ours, theirs = set_by_first_batch()[0], set_by_first_batch()[0]
    theirs.load_state_dict(ours.state_dict())
    for changed, words in (
        ("scale", "sets its parameter scale in its first forward pass, each rank from its own batch; set it"),
        (
            "head.weight",
            "parameter head.weight differs between ranks after training: gradients were not sync",
        ),
    ):
        monkeypatch.setattr(dist, "all_reduce", Peer(theirs).all_reduce)
        require_equal_parameters(ours, spec)
        with torch.no_grad():
            theirs.get_parameter(changed).add_(1)
        monkeypatch.setattr(dist, "all_reduce", Peer(theirs).all_reduce)
        with pytest.raises((CannotTrain, RuntimeError), match=words):
            require_equal_parameters(ours, spec)
        theirs.load_state_dict(ours.state_dict())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("hook", "each"), [("none", 8), ("bf16", 2), ("fp16", 2)])
def test_sent_bytes_follow_the_hooks_type(hook: CommHook, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters are float64; the hooks send them in 16 bits. Frozen parameters are not sent."""

    def frozen_in_part(_: str) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.Linear(10, 10)).double()
        model[2].requires_grad_(False)
        return model

    monkeypatch.setattr(model_and_data, "build", frozen_in_part)
    monkeypatch.setattr(model_and_data, "require_classifier", lambda *_: None)
    spec = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="ddp", comm_hook=hook, epoch_images=4)
    assert sent_bytes(TrainingStep(spec, rank=0, device=CPU)) == {"gradient_bytes": each * 10 * 3073}


def small_image_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(900, 10)
    )


def test_too_few_outputs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU a label beyond the outputs would end the process."""
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    spec = TrainingSpec(world_size=1, per_rank_batch_size=4, strategy="single", epoch_images=32, data="mine")
    for classes in (10, 11):
        labels = torch.arange(32) % classes
        torch.save(
            {"train_images": torch.zeros(32, 3, 32, 32, dtype=torch.uint8), "train_labels": labels},
            tmp_path / "x.pt",
        )
        monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "x.pt"))
        if classes == 10:
            TrainingStep(spec, rank=0, device=CPU)
    with pytest.raises(
        ValueError, match=r"^model resnet18 has 10 outputs, the data set 11 classes; name another model$"
    ):
        TrainingStep(spec, rank=0, device=CPU)


def test_checking_the_outputs_changes_nothing() -> None:
    model = small_image_model()
    before = copy.deepcopy(model.state_dict())
    require_classifier(
        "small", model, Images(pixels=synthetic_images(8).pixels, labels=torch.tensor([9])), CPU
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


# --- a round


def step_by(strategy: Strategy) -> MeasuredStep:
    spec = TrainingSpec(world_size=1, per_rank_batch_size=4, strategy=strategy, epoch_images=32)
    return MeasuredStep(TrainingStep(spec, rank=0, device=CPU))


@pytest.mark.usefixtures("group")
def test_only_ddp_compares_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank has no other ranks to compare with."""
    asked: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: asked.append(tensor.numel()))
    alone, in_group = step_by("single"), step_by("ddp")
    alone.cpu_seconds = in_group.cpu_seconds = [0.5]
    assert alone.finish() == {"cpu_seconds": 0.5}
    assert asked == []
    assert in_group.finish() == {"cpu_seconds": 0.5, "gradient_bytes": 4 * 11_689_512}
    assert sum(asked) == 2 * 4 * 11_689_512, "the least and the greatest of each byte"


@pytest.mark.parametrize("pixel", [math.nan, math.inf])
def test_a_nan_loss_is_refused(pixel: float) -> None:
    step = step_by("single")
    step.step()
    step.end_round(1)
    step.training.input.take()[0][0, 0, 0, 0] = pixel
    step.step()
    with pytest.raises(
        FloatingPointError, match=r"^the loss is nan after a round of 7 steps: SGD has a learning rate"
    ):
        step.end_round(7)


def test_cpu_seconds_are_per_step_and_a_median_over_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch has 8 steps."""
    spec = EpochSpec(world_size=1, per_rank_batch_size=4, strategy="single", epoch_images=32)
    step = MeasuredStep(TrainingStep(spec, rank=0, device=CPU))
    step.training.loss = torch.tensor(1.0)
    now = iter((10.0, 14.0, 20.0, 21.0, 50.0, 52.0))
    clock = SimpleNamespace(process_time=lambda: next(now))
    monkeypatch.setattr("ddpperf.training.measured_step.time", clock)
    for measurement, steps in ((step, 2), (step, 4), (TrainingEpoch(step), 1)):
        measurement.start_round()
        measurement.end_round(steps)
    assert step.cpu_seconds == [2, 0.25, 0.25]
    assert step.finish() == {"cpu_seconds": 0.25}


def test_compile_time_is_read_after_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(
        "ddpperf.training.measured_step.clock.synchronize", lambda device: done.append("synchronize")
    )

    def read_clock() -> float:
        done.append("clock")
        return float(len(done))

    clock = SimpleNamespace(perf_counter=read_clock)
    monkeypatch.setattr("ddpperf.training.measured_step.time", clock)
    monkeypatch.setattr("ddpperf.training.measured_step.require_compiled", lambda losses: None)
    training = SimpleNamespace(device=torch.device("cpu"), forward=None)
    step = SimpleNamespace(
        training=training, train=lambda: done.append("train"), startup_seconds={}, run=None
    )
    MeasuredStep._first_train(step)  # type: ignore[arg-type]
    assert done == ["synchronize", "clock", "train", "synchronize", "clock"]
    assert step.startup_seconds == {"compile_seconds": 3.0}
    assert step.run is step.train
