"""LARS, LAMB and Muon: steps computed by hand from their papers' formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpperf.training import optimizers
from ddpperf.training.optimizers import Lamb, Lars, Muon

SETTINGS = {"momentum": 0.9, "weight_decay": 0.0}


def lars(parameters: list[nn.Parameter], **settings: float) -> Lars:
    return Lars(parameters, SETTINGS | settings)


def lamb(parameters: list[nn.Parameter], **settings: float) -> Lamb:
    return Lamb(parameters, SETTINGS | settings)


def muon(parameters: list[nn.Parameter], **settings: float) -> Muon:
    """Return Muon that makes the steps of all matrices orthogonal."""
    kinds = ([each for each in parameters if (each.ndim > 1) is matrix] for matrix in (True, False))
    groups = [
        {"params": kind, "orthogonal": matrix} for kind, matrix in zip(kinds, (True, False), strict=True)
    ]
    return Muon([group for group in groups if group["params"]], SETTINGS | settings)


MAKERS: list[Callable[..., torch.optim.Optimizer]] = [lars, lamb, muon]


def parameter(*values: Any) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def stepped(optimizer: torch.optim.Optimizer, gradients: dict[nn.Parameter, Tensor]) -> None:
    for each, gradient in gradients.items():
        each.grad = gradient.clone()
    optimizer.step()


def test_lars_steps_in_proportion_to_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With |w| = 5 and |g| = 13 the local rate is 0.01 * 5 / (13 + 0.1 * 5), on g + 0.1 w."""
    monkeypatch.setattr(optimizers, "TRUST", 0.01)
    weight, bias = parameter([3.0, 4.0]), parameter(2.0)
    optimizer = Lars([weight, bias], {"lr": 2.0, "momentum": 0.5, "weight_decay": 0.1})
    stepped(optimizer, {weight: torch.tensor([[5.0, 12.0]]).double(), bias: torch.tensor([0.25]).double()})
    local = 0.01 * 5 / (13 + 0.1 * 5)
    velocity = [2 * local * (5 + 0.3), 2 * local * (12 + 0.4)]
    moved = [3 - velocity[0], 4 - velocity[1]]
    assert weight[0].tolist() == pytest.approx(moved)
    assert bias.tolist() == pytest.approx([2 - 2 * 0.25])
    stepped(optimizer, {weight: torch.tensor([[1.0, 0.0]]).double(), bias: torch.tensor([0.0]).double()})
    local = 0.01 * (moved[0] ** 2 + moved[1] ** 2) ** 0.5
    local /= 1 + 0.1 * (moved[0] ** 2 + moved[1] ** 2) ** 0.5
    velocity = [
        0.5 * velocity[0] + 2 * local * (1 + 0.1 * moved[0]),
        0.5 * velocity[1] + 2 * local * 0.1 * moved[1],
    ]
    assert weight[0].tolist() == pytest.approx([moved[0] - velocity[0], moved[1] - velocity[1]])
    assert bias.tolist() == pytest.approx([1.5 - 0.5 * 0.5])


def test_lambs_step_length_follows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step m / sqrt(v) is the gradient's sign for any betas."""
    monkeypatch.setattr(optimizers, "SECOND_BETA", 0.99)
    monkeypatch.setattr(optimizers, "EPSILON", 0.0)
    weight, bias = parameter([3.0, 4.0]), parameter(2.0)
    optimizer = Lamb([weight, bias], {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5})
    stepped(optimizer, {weight: torch.tensor([[5.0, -12.0]]).double(), bias: torch.tensor([0.25]).double()})
    update = torch.tensor([1 + 0.5 * 3, -1 + 0.5 * 4]).double()
    moved = torch.tensor([3.0, 4.0]).double() - 0.1 * 5 / update.norm() * update
    torch.testing.assert_close(weight.detach()[0], moved)
    assert bias.tolist() == pytest.approx([2 - 0.1]), "a vector has Adam's step"
    stepped(optimizer, {weight: torch.tensor([[1.0, 2.0]]).double(), bias: torch.tensor([0.25]).double()})
    mean = torch.tensor([0.9 * 0.1 * 5 + 0.1 * 1, -0.9 * 0.1 * 12 + 0.1 * 2]).double() / (1 - 0.9**2)
    square = torch.tensor([0.99 * 0.01 * 25 + 0.01 * 1, 0.99 * 0.01 * 144 + 0.01 * 4]).double() / (
        1 - 0.99**2
    )
    update = mean / square.sqrt() + 0.5 * moved
    torch.testing.assert_close(weight.detach()[0], moved - 0.1 * moved.norm() / update.norm() * update)


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (8, 8)])
def test_muon_on_matrices_is_torchs(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (
        [nn.Parameter(each) for each in copy.deepcopy(values)]
        for values in [[torch.randn(shape, generator=generator) for _ in range(3)]] * 2
    )
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    own, torchs = muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(shape, generator=generator)
            other.grad = one.grad.clone()
        own.step()
        torchs.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)  # bfloat16's roundings


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_muon_flattens_convolution_weights_to_matrices(
    memory_format: torch.memory_format,
) -> None:
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(8, 4, 3, 3, generator=generator) for _ in range(2))
    weight = nn.Parameter(values.clone(memory_format=memory_format))
    matrix = nn.Parameter(values.flatten(1).clone())
    for parameters, given in (([weight], gradient), ([matrix], gradient.flatten(1))):
        parameters[0].grad = given.clone()
        muon(parameters, lr=0.1).step()
    torch.testing.assert_close(weight.detach().flatten(1), matrix.detach(), rtol=0, atol=1e-6)
    assert weight.is_contiguous(memory_format=memory_format)


def test_muon_steps_other_parameters_like_sgd() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)]
    ours, theirs = ([nn.Parameter(each.clone()) for each in values] for _ in range(2))
    own = Muon([{"params": ours, "orthogonal": False}], {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        own.step()
        theirs[0].data.mul_(1 - 0.1 * 0.01)  # the matrix decays, beside its gradient
        sgd.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("make", MAKERS)
def test_a_rate_tensor_is_read_in_every_step(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    """A CUDA graph would repeat the rate of the captured step."""
    numbers, tensors = ([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))] for _ in range(2))
    by_number, by_tensor = make(numbers, lr=1.0), make(tensors, lr=1.0)
    rate = torch.ones(())
    by_tensor.param_groups[0]["lr"] = rate
    for step in (0.5, 0.25):
        by_number.param_groups[0]["lr"] = step
        rate.fill_(step)
        for each in (*numbers, *tensors):
            each.grad = torch.full_like(each, step)
        by_number.step()
        by_tensor.step()
    for one, other in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("make", MAKERS)
def test_parameters_without_gradient_stay(make: Callable[..., torch.optim.Optimizer]) -> None:
    weight, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = make([weight, other], lr=0.1)
    other.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(weight, torch.ones(2, 2))
    assert not torch.equal(other, torch.ones(2, 2))


@pytest.mark.parametrize("make", MAKERS)
def test_weights_and_gradients_of_0_stay_finite(make: Callable[..., torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = make([weight], lr=0.1)
    for gradient in (torch.zeros(2, 2), torch.ones(2, 2)):
        weight.grad = gradient
        optimizer.step()
        assert weight.isfinite().all()
