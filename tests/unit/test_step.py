"""A training step in process: SGD by the formula, precisions, memory formats, inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.data.augmentation import Batch
from ddpperf.data.images import normalized, synthetic_images
from ddpperf.data.sampler import EpochBatches
from ddpperf.specs import Precision, TrainingSpec
from ddpperf.specs.training_step import MemoryFormat, Strategy
from ddpperf.training.measured_step import LOSS_STEPS, MeasuredStep
from ddpperf.training.models import MODELS
from ddpperf.training.step import TrainingStep

CPU = torch.device("cpu")


def training_step(strategy: Strategy = "single", *, rank: int = 0, **fields: Any) -> MeasuredStep:
    usual: dict[str, Any] = {"world_size": 1, "per_rank_batch_size": 4, "epoch_images": 32}
    spec = TrainingSpec(**usual | fields, strategy=strategy)
    return MeasuredStep(TrainingStep(spec, rank=rank, device=CPU))


def batch_of(step: MeasuredStep) -> Batch:
    return step.training.input.batch


def parameters(step: MeasuredStep) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in step.training.model.parameters()]


def small_image_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(900, 10)
    )


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """torch's deterministic algorithms fill the memory of new tensors with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
def test_overflow_of_the_first_fused_step_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused optimizer, as on GPUs, gets its momentum in its first step, even if it skips the step."""
    sgd = torch.optim.SGD
    monkeypatch.setattr(torch.optim, "SGD", lambda groups, **fields: sgd(groups, **fields | {"fused": True}))
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    step = training_step(precision="fp16")
    scaler = step.training.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**24})
    before = parameters(step)
    step.step()
    assert scaler.get_scale() == 2.0**23, "it overflowed"
    assert all(map(torch.equal, parameters(step), before))
    scaler.update(2.0**12)
    step.step()
    changed = parameters(step)
    assert not any(map(torch.equal, changed, before))
    assert all(bool(parameter.isfinite().all()) for parameter in changed)


def test_a_step_is_sgd_with_a_cosine_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare in float64: BatchNorm over few values amplifies float32's rounding.

    An epoch has 8 steps, after which the rate begins anew.
    """
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    step = training_step()
    step.training.model.double()
    images, labels = batch_of(step)
    step.training.input.batch = images.double(), labels
    torch.manual_seed(0)
    reference = small_image_model().double()
    weights = list(reference.parameters())
    velocities = [torch.zeros_like(weight) for weight in weights]
    for number in range(11):
        step.step()
        rate = 0.005 * (1 + math.cos(math.pi * (number % 8) / 8))
        loss = F.cross_entropy(reference(images.double()), labels)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient, velocity in zip(weights, gradients, velocities, strict=True):
                velocity.mul_(0.9).add_(gradient + 5e-4 * weight)
                weight.sub_(rate * velocity)
        assert step.training.loss.item() == pytest.approx(loss.item(), rel=1e-9)
    for ours, theirs in zip(step.training.model.parameters(), weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("precision", "computed_in"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_keeps_float32_parameters(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, computed_in: torch.dtype
) -> None:
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    step = training_step(precision=precision)
    assert isinstance(step.training.model, nn.Sequential)
    computed: list[torch.dtype] = []
    step.training.model[0].register_forward_hook(lambda _, __, output: computed.append(output.dtype))
    before = parameters(step)
    for _ in range(LOSS_STEPS):
        step.step()
    step.end_round(LOSS_STEPS)
    assert set(computed) == {computed_in}
    assert {parameter.dtype for parameter in step.training.model.parameters()} == {torch.float32}
    assert not any(torch.equal(was, now) for was, now in zip(before, parameters(step), strict=True)), (
        "no update was skipped"
    )
    assert step.training.scaler.is_enabled() == (precision == "fp16")


def test_lower_precision_has_nearly_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "resnet18", small_image_model)
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    steps = [training_step(precision=precision) for precision in precisions]
    for step in steps * (LOSS_STEPS + 1):
        step.step()
    losses = [step.training.loss.item() for step in steps]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[2] == pytest.approx(losses[0], rel=0.01)


def test_the_early_loss_follows_five_updates() -> None:
    step, losses = training_step(), []
    for _ in range(LOSS_STEPS + 2):
        step.step()
        losses.append(step.training.loss.item())
    step.end_round(step.steps)
    assert step.finish()["loss_after_5_steps"] == losses[5], "the forward after the fifth update is the sixth"


def test_the_fixed_batch_is_the_shards_first() -> None:
    step, images = training_step(), synthetic_images(32)
    indices = next(iter(EpochBatches(step.training.spec, 0)))
    pixels, labels = batch_of(step)
    assert torch.equal(pixels, normalized(images.pixels[indices], torch.contiguous_format))
    assert torch.equal(labels, images.labels[indices])


def test_single_ranks_do_the_same_step() -> None:
    """The slowest of them is the t(1) of a speedup."""
    first, second = training_step(rank=0), training_step(rank=3)
    first.step()
    second.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters(first), parameters(second), strict=True))


def test_each_rank_draws_its_own_numbers() -> None:
    """Such as the crops of a DataLoader. The parameters are drawn before, alike on all ranks."""
    drawn = []
    for rank in (0, 1):
        training_step(rank=rank)
        drawn.append(torch.rand(()).item())
    assert drawn[0] != drawn[1]


def test_channels_last_changes_strides_only() -> None:
    formats: tuple[MemoryFormat, ...] = ("contiguous", "channels_last")
    steps = [training_step(memory_format=each) for each in formats]
    for step in steps:
        step.step()
    assert steps[1].training.loss.item() == pytest.approx(steps[0].training.loss.item(), rel=1e-5)
    pixels = [batch_of(step)[0] for step in steps]
    assert torch.equal(*pixels)
    weights = [next(each for each in parameters(step) if each.dim() == 4) for step in steps]
    for contiguous, channels_last in (pixels, weights):
        assert contiguous.is_contiguous()
        assert channels_last.is_contiguous(memory_format=torch.channels_last)
        assert not channels_last.is_contiguous()
