"""How an epoch's images are split between ranks: the indices that every input trains on, counted over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.data.images import EpochBatches
from ddpperf.specs import SamplerSpec


class Sampling:
    """`step` lists this rank's shard of the next epoch; `finish` counts what the shards of two epochs hold."""

    max_iterations = 64  # the check at the end is what counts here

    def __init__(self, spec: SamplerSpec, *, rank: int, device: torch.device) -> None:
        self.images = spec.epoch_images
        self.device = device
        self.batches = EpochBatches(
            spec.epoch_images,
            world_size=spec.world_size,
            rank=rank,
            batch_size=spec.shard_images,
            drop_last=spec.drop_last,
            set_epoch=spec.set_epoch,
        )
        self.epoch = 0
        self.shard: list[list[int]] = []

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def start_round(self) -> None:
        """Nothing to prepare: each round samples on."""

    def step(self) -> None:
        self.batches.set_epoch(self.epoch)
        self.shard = list(self.batches)
        self.epoch += 1

    def end_round(self, steps: int) -> None:
        """Nothing to check until the end, when all ranks' shards are put together."""

    def finish(self) -> dict[str, float]:
        """Over all ranks: images that an epoch leaves out, and trains on more than once; the share of places in the
        rank's own shard at which the next epoch has the same image."""
        self.step()
        first = self._indices()
        self.step()
        second = self._indices()
        seen = torch.zeros(self.images, dtype=torch.int64, device=self.device)
        seen.index_add_(0, first, torch.ones_like(first))
        dist.all_reduce(seen)
        return {
            "missing_images": float((seen == 0).sum()),
            "repeated_images": float((seen - 1).clamp(min=0).sum()),
            "repeated_places": int((first == second).sum()) / len(first),
        }

    def _indices(self) -> Tensor:
        return torch.tensor([index for batch in self.shard for index in batch], device=self.device)
