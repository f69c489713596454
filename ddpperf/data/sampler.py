"""Measure how fast a rank samples an epoch, and check how the ranks split the epoch's images."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddpperf.data.images import EpochBatches
from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import SamplerSpec


class Sampling(Measurement):
    """Measures how long a rank takes to list its images of an epoch."""

    max_iterations = 64  # the counts matter more than the time

    def __init__(self, spec: SamplerSpec, *, rank: int, device: torch.device) -> None:
        self.images = spec.epoch_images
        self.device = device
        self.batches = EpochBatches(spec.shard, rank, set_epoch=spec.set_epoch)
        self.epoch = 0
        self.indices: list[int] = []

    def step(self) -> None:
        """List the indices of the images that this rank gets in the next epoch."""
        self.batches.set_epoch(self.epoch)
        (self.indices,) = self.batches
        self.epoch += 1

    def finish(self) -> dict[str, float]:
        """Count the images that no rank or several ranks get in an epoch.

        missing_images: the number of images that no rank gets. repeated_images: the number of
        repetitions over all ranks. repeated_places: the fraction of places in this rank's list that
        have the same image in the next epoch.
        """
        self.step()
        first = torch.tensor(self.indices)
        self.step()
        seen = first.bincount(minlength=self.images).to(self.device)
        dist.all_reduce(seen)
        missing, repeated = float((seen == 0).sum()), float((seen - 1).clamp(min=0).sum())
        places = int((first == torch.tensor(self.indices)).sum()) / len(first)
        return {"missing_images": missing, "repeated_images": repeated, "repeated_places": places}
