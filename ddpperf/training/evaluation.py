"""Compute a model's loss and accuracy on the test images, which all ranks divide up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.data.images import Images
from ddpperf.data.inputs import normalized
from ddpperf.specs import RunSpec
from ddpperf.training.model_and_data import MEMORY_FORMATS

Autocast = Callable[[], AbstractContextManager[object]]
BATCH_SIZE = 1000
STATISTICS_IMAGES = 4096  # images, over all ranks, for recomputing BatchNorm's statistics


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


def recompute_statistics(model: nn.Module, batches: Iterator[Tensor], autocast: Autocast) -> None:
    """Recompute the means and variances of a model's BatchNorm layers from the given batches.

    After a few dozen steps BatchNorm's running statistics are still far from the statistics of the
    current parameters.
    """
    with autocast():
        torch.optim.swa_utils.update_bn(batches, model)


def average_buffers(model: nn.Module, world_size: int) -> None:
    """Average BatchNorm's running statistics over the ranks, which have seen different images."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(world_size)
