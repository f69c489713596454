"""Average a model's weights over the steps of a training."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

# Larger values give the last steps more weight. With 8, the last 7% of the steps have half of it.
ETA = 8


class AveragedWeights:
    """The average of a model's parameters and BatchNorm statistics over all steps so far.

    After step t: average = average + (ETA + 1) / (t + ETA) (weights - average), which is the
    polynomial-decay average of Shamir and Zhang 2013, section 4. Older steps lose their weight at
    the same relative speed in trainings of any length. torch's AveragedModel waits for the device
    in each step.
    module: a copy of the model with the averaged weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model)
        self._weights, self._average = _floating(model), _floating(self.module)
        self.steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's weights after one more training step."""
        self.steps += 1
        torch._foreach_lerp_(self._average, self._weights, (ETA + 1) / (self.steps + ETA))


def _floating(model: nn.Module) -> list[Tensor]:
    return [value for value in model.state_dict().values() if value.is_floating_point()]
