"""Loss and accuracy on images that a model was not trained on, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddpperf.data.images import Images
from ddpperf.data.inputs import normalized

BATCH_SIZE = 1000
STATISTICS_IMAGES = 4096  # of all ranks, from which BatchNorm's are computed


class Evaluation:
    """Each rank takes its share of the images; what they find is added up."""

    def __init__(
        self,
        images: Images,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> None:
        self.pixels = images.pixels[rank::world_size].to(device)
        self.labels = images.labels[rank::world_size].to(device)
        self.world_size = world_size
        self.memory_format = memory_format

    @torch.no_grad()
    def __call__(
        self, model: nn.Module, autocast: Callable[[], AbstractContextManager[object]]
    ) -> tuple[float, float]:
        """The mean loss, without smoothing, and the share of images that are classified right."""
        model.eval()
        found = torch.zeros(
            3, dtype=torch.float64, device=self.labels.device
        )  # of losses, of right ones, of all
        for pixels, labels in zip(self.pixels.split(BATCH_SIZE), self.labels.split(BATCH_SIZE), strict=True):
            with autocast():
                outputs = model(normalized(pixels, self.memory_format)).float()
            found[0] += F.cross_entropy(outputs, labels, reduction="sum")
            found[1] += (outputs.argmax(1) == labels).sum()
            found[2] += len(labels)
        model.train()
        if self.world_size > 1:
            dist.all_reduce(found)
        loss, right, count = found.tolist()
        return loss / count, right / count


def recompute_statistics(
    model: nn.Module, batches: Iterator[Tensor], autocast: Callable[[], AbstractContextManager[object]]
) -> None:
    """BatchNorm's means and variances of these batches, instead of those that the last steps left: after a few dozen steps they
    are still far from the parameters'."""
    with autocast():
        torch.optim.swa_utils.update_bn(batches, model)


def average_buffers(model: nn.Module, world_size: int) -> None:
    """BatchNorm's statistics of all ranks: each has seen images of its own."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(world_size)
