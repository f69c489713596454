"""The average of a model's weights over the steps of a training."""

from __future__ import annotations

import torch
from torch import nn

from ddpperf.training.evaluation import ETA, AveragedWeights


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_average_weighs_steps_by_a_polynomial() -> None:
    live = model()
    averaged = AveragedWeights(live)
    weights, steps = [], 40
    for _ in range(steps):
        for value in live.state_dict().values():
            if value.is_floating_point():
                value.normal_()
        weights.append({name: value.clone() for name, value in live.state_dict().items()})
        averaged.update()
    # the product of (1 - (ETA + 1) / (t + ETA)) over later steps, times the step's own weight
    factors = torch.ones(steps, dtype=torch.float64)
    for step in range(steps):
        factors[:step] *= 1 - (ETA + 1) / (step + 1 + ETA)
        factors[step] = (ETA + 1) / (step + 1 + ETA)
    assert abs(factors.sum().item() - 1) < 1e-12
    for name in ("0.weight", "1.running_mean", "1.weight"):
        expected = sum(
            factor * found[name].double() for factor, found in zip(factors.tolist(), weights, strict=True)
        )
        torch.testing.assert_close(averaged.module.state_dict()[name].double(), expected)
