"""Evaluate a model on the test images, and average its weights over steps or its statistics over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddpperf.data.images import MEMORY_FORMATS, Images, normalized
from ddpperf.specs import RunSpec

Autocast = Callable[[], AbstractContextManager[object]]
BATCH_SIZE = 1000
# Larger values give the last steps more weight. With 8, the last 7% of the steps have half of it.
ETA = 8


class Evaluation:
    """Evaluates a model on the test images, of which each rank holds a part."""

    def __init__(self, images: Images, spec: RunSpec, rank: int, device: torch.device) -> None:
        self.pixels = images.pixels[rank :: spec.world_size].to(device)
        self.labels = images.labels[rank :: spec.world_size].to(device)
        self.grouped, self.memory_format = spec.grouped, MEMORY_FORMATS[spec.memory_format]

    @torch.no_grad()
    def __call__(
        self, model: nn.Module, autocast: Autocast, *, mirrored: bool = False
    ) -> tuple[float, float]:
        """Return a model's mean loss and accuracy on the test images of all ranks together.

        The loss is without label smoothing. mirrored: whether to take the mean of the outputs for
        each image and its mirror image, which takes twice as long (test-time augmentation).
        """
        model.eval()
        # The sum of the losses, the number of correctly classified images, the number of images.
        sums = torch.zeros(3, dtype=torch.float64, device=self.labels.device)
        for pixels, labels in zip(self.pixels.split(BATCH_SIZE), self.labels.split(BATCH_SIZE), strict=True):
            with autocast():
                outputs = model(normalized(pixels, self.memory_format)).float()
                if mirrored:
                    outputs += model(normalized(pixels.flip(3), self.memory_format)).float()
                    outputs /= 2
            sums[0] += F.cross_entropy(outputs, labels, reduction="sum")
            sums[1] += (outputs.argmax(1) == labels).sum()
            sums[2] += len(labels)
        model.train()
        if self.grouped:
            dist.all_reduce(sums)
        loss, right, count = sums.tolist()
        return loss / count, right / count


def average_buffers(model: nn.Module, world_size: int) -> None:
    """Average BatchNorm's running statistics over the ranks, which have seen different images."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(world_size)


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
        self._weights, self._average = (
            [value for value in each.state_dict().values() if value.is_floating_point()]
            for each in (model, self.module)
        )
        self.steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's weights after one more training step."""
        self.steps += 1
        torch._foreach_lerp_(self._average, self._weights, (ETA + 1) / (self.steps + ETA))
