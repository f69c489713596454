"""The training step in process: it is SGD as written down, the same on every rank but for its batch, and checked."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.data import synthetic_batch
from ddpperf.models import MODELS
from ddpperf.specs import Precision, Strategy, TrainingSpec
from ddpperf.training import LOSS_STEPS, TrainingStep, allow_tf32, require_equal_parameters
from tests.strategies import one_thread

CPU = torch.device("cpu")


_one_thread = pytest.fixture(autouse=True, scope="module")(one_thread)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def training_step(strategy: Strategy = "single", *, rank: int = 0, precision: Precision = "fp32") -> TrainingStep:
    spec = TrainingSpec(world_size=1, per_rank_batch_size=4, strategy=strategy, precision=precision)
    return TrainingStep(spec, rank=rank, device=CPU)


def parameters(step: TrainingStep) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


def small_image_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(900, 10))


def test_a_step_is_sgd_with_momentum_and_weight_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, because a BatchNorm over few values makes a float32's rounding large within a few steps."""
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    step = training_step()
    step.model.double()
    step.images = step.images.double()
    images, labels = synthetic_batch(4, seed=0)
    torch.manual_seed(0)
    reference = small_image_model().double()
    weights = list(reference.parameters())
    velocities = [torch.zeros_like(weight) for weight in weights]
    for _ in range(4):
        step.step()
        loss = F.cross_entropy(reference(images.double()), labels)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient, velocity in zip(weights, gradients, velocities, strict=True):
                velocity.mul_(0.9).add_(gradient + 5e-4 * weight)
                weight.sub_(0.01 * velocity)
        assert step.loss.item() == pytest.approx(loss.item(), rel=1e-9)
    for ours, theirs in zip(step.model.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_training_on_learns_the_batch() -> None:
    step = training_step()
    step.step()
    first = step.loss.item()
    for _ in range(2):
        step.start_round()
        for _ in range(4):
            step.step()
        step.end_round(4)
    assert first == pytest.approx(math.log(1000), abs=1)
    assert step.finish()["loss_after_5_steps"] < first / 4


@pytest.mark.parametrize(
    ("precision", "computed_in"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_precision_computes_in_its_type_over_float32_parameters(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, computed_in: torch.dtype
) -> None:
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    step = training_step(precision=precision)
    assert isinstance(step.model, nn.Sequential)
    computed: list[torch.dtype] = []
    step.model[0].register_forward_hook(lambda _, __, output: computed.append(output.dtype))
    before = parameters(step)
    for _ in range(LOSS_STEPS):
        step.step()
    step.end_round(LOSS_STEPS)
    assert set(computed) == {computed_in}
    assert {parameter.dtype for parameter in step.model.parameters()} == {torch.float32}
    assert not any(torch.equal(was, now) for was, now in zip(before, parameters(step), strict=True)), "no update was skipped"
    assert step.scaler.is_enabled() == (precision == "fp16")


def test_lower_precision_follows_the_losses_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    losses = [training_step(precision=precision).finish()["loss_after_5_steps"] for precision in precisions]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[2] == pytest.approx(losses[0], rel=0.01)
    assert len(set(losses)) == 3, "they are not the same computation"


def test_the_early_loss_is_that_of_its_step_however_many_follow() -> None:
    few, many = training_step(), training_step()
    for _ in range(LOSS_STEPS + 5):
        many.step()
    assert few.finish()["loss_after_5_steps"] == pytest.approx(many.finish()["loss_after_5_steps"], rel=1e-5)


def test_every_rank_starts_alike_with_a_batch_of_its_own() -> None:
    first, second = training_step(rank=0), training_step(rank=1)
    assert all(torch.equal(a, b) for a, b in zip(parameters(first), parameters(second), strict=True))
    assert not torch.equal(first.images, second.images)
    first.step()
    second.step()
    assert not all(torch.equal(a, b) for a, b in zip(parameters(first), parameters(second), strict=True))


@pytest.mark.usefixtures("group")
def test_ddp_on_one_rank_is_the_same_step() -> None:
    alone, in_group = training_step("single"), training_step("ddp")
    for step in (alone, in_group):
        step.step()
        step.step()
        step.end_round(2)
    assert alone.finish() == in_group.finish()
    assert all(torch.equal(a, b) for a, b in zip(parameters(alone), parameters(in_group), strict=True))


@pytest.mark.usefixtures("group")
def test_ddp_takes_part_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a DDP measurement asks the other ranks; that of a single one has nobody to ask."""
    asked: list[int] = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        asked.append(tensor.numel())
        real(tensor, op)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    training_step("single").finish()
    assert asked == []
    training_step("ddp").finish()
    assert sum(asked) == 2 * 11_689_512


@pytest.mark.parametrize("pixel", [math.nan, math.inf])
def test_a_loss_that_is_nan_is_refused(pixel: float) -> None:
    step = training_step()
    step.step()
    step.end_round(1)
    step.images[0, 0, 0, 0] = pixel
    step.step()
    with pytest.raises(FloatingPointError, match="the loss is nan after a round of 7 steps"):
        step.end_round(7)


def test_a_loss_that_is_infinite_is_refused() -> None:
    step = training_step()
    step.loss = torch.tensor(math.inf)
    with pytest.raises(FloatingPointError, match="the loss is inf after a round of 1 steps"):
        step.end_round(1)


def test_tf32_is_allowed_where_it_is_asked_for() -> None:
    backends: Any = torch.backends
    training_step(precision="tf32")
    assert backends.cudnn.conv.fp32_precision == backends.cuda.matmul.fp32_precision == "tf32"


def test_fp32_is_not_tf32() -> None:
    backends: Any = torch.backends
    backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = "tf32"
    training_step()
    assert backends.cudnn.conv.fp32_precision == backends.cuda.matmul.fp32_precision == "ieee"


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


class Peer:
    """Stands for the other rank of two: `all_reduce` meets its parameters, in the order in which they are asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._bits = [parameter.detach().view(torch.int32) for parameter in model.parameters()]
        self._asked = 0

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        bits = self._bits[self._asked // 2]  # a least and a greatest of each
        self._asked += 1
        tensor.copy_({dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}[op](tensor, bits))


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))


def test_equal_parameters_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    monkeypatch.setattr(dist, "all_reduce", Peer(copy.deepcopy(model)).all_reduce)
    require_equal_parameters(model)


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "2.weight", "2.bias"])
@pytest.mark.parametrize("towards", [math.inf, -math.inf])
def test_parameters_that_differ_in_one_bit_are_found(name: str, towards: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    other = copy.deepcopy(model)
    with torch.no_grad():
        element = other.get_parameter(name).view(-1)[-1]
        element.copy_(torch.nextafter(element, torch.tensor(towards)))
    for ours, theirs in ((model, other), (other, model)):  # every rank finds it
        monkeypatch.setattr(dist, "all_reduce", Peer(theirs).all_reduce)
        with pytest.raises(RuntimeError, match=rf"parameter {name} differs between ranks after training"):
            require_equal_parameters(ours)


@pytest.mark.usefixtures("group")
def test_nan_parameters_with_equal_bits_are_equal() -> None:
    """What a NaN means is the loss' affair; here only a difference between ranks is."""
    model = small_model()
    with torch.no_grad():
        model.get_parameter("2.bias").fill_(math.nan)
    require_equal_parameters(model)
