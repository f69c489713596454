"""Divide the images of an epoch among the ranks, and measure and check how they are divided."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ddpperf.measuring.repeated_work import Measurement
from ddpperf.specs import SamplerSpec, TrainingSpec


class EpochBatches:
    """Yields the image indices of each batch that one rank gets in an epoch.

    `set_epoch` chooses the epoch. torch's DistributedSampler chooses the rank's images. A batch
    larger than the rank's share of the images is filled by repeating images.
    """

    def __init__(self, spec: SamplerSpec | TrainingSpec, rank: int) -> None:
        self.shard, self._own_orders = spec.shard, spec.set_epoch
        self.sampler: DistributedSampler[int] = DistributedSampler(
            range(self.shard.epoch_images),  # type: ignore[arg-type]  # it reads the length only
            num_replicas=self.shard.processes,
            rank=rank if spec.grouped else 0,
            drop_last=self.shard.drop_last,
            seed=spec.seed << 10,  # the sampler adds the epoch's number
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, whose number determines the random order of the images.

        Without the spec's set_epoch, all epochs have the order of epoch 0.
        """
        self.sampler.set_epoch(epoch if self._own_orders else 0)

    def __iter__(self) -> Iterator[list[int]]:
        indices = cycle(self.sampler)
        shard = self.shard
        for size in [shard.batch_size] * (shard.steps - 1) + [shard.last_batch_size]:
            yield list(islice(indices, size))


class Sampling(Measurement):
    """Measures how long a rank takes to list its images of an epoch."""

    max_iterations = 64  # the counts matter more than the time

    def __init__(self, spec: SamplerSpec, *, rank: int, device: torch.device) -> None:
        self.images = spec.epoch_images
        self.device = device
        self.batches = EpochBatches(spec, rank)
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
