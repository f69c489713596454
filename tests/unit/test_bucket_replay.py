"""Replayed all_reduces have known sums: right sums pass, a missing all_reduce is found."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.instruments.bucket_replay import BucketReplay
from ddpperf.specs import BucketReplaySpec
from ddpperf.specs.training_step import CommHook

TYPES: dict[CommHook, torch.dtype] = {
    "none": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
CASES = [(hook, N) for hook in TYPES for N in (2, 3, 4, 6, 7, 8, 16, 24, 32, 96)]


class Ranks:
    """Ranks in this process. `all_reduce` adds up their buffers in the buffers' type, in any order."""

    def __init__(self, hook: CommHook, world_size: int, dtype: torch.dtype) -> None:
        spec = BucketReplaySpec(world_size=world_size, per_rank_batch_size=4, strategy="ddp", comm_hook=hook)
        self.ranks = [
            BucketReplay(spec, [(5, dtype), (3, dtype)], rank=rank, device=torch.device("cpu"))
            for rank in range(world_size)
        ]
        self.random = random.Random(world_size)
        self.max_iterations = self.ranks[0].max_iterations
        for rank in self.ranks:
            rank.start_round()

    def all_reduce(self) -> None:
        for buffers in zip(*(rank.buffers for rank in self.ranks), strict=True):
            parts = [buffer.clone() for buffer in buffers]
            if self.ranks[0].operation == dist.ReduceOp.AVG:
                parts = [part * torch.tensor(1 / len(parts), dtype=part.dtype) for part in parts]
            self.random.shuffle(parts)
            total: Tensor = parts[0]
            for part in parts[1:]:
                total = total + part
            for buffer in buffers:
                buffer.copy_(total)

    def accepts(self, steps: int) -> bool:
        try:
            for rank in self.ranks:
                rank.end_round(steps)
        except ArithmeticError:
            return False
        return True


@pytest.mark.parametrize(("hook", "world_size"), CASES)
def test_missing_all_reduce_is_found_in_every_round(hook: CommHook, world_size: int) -> None:
    """A round has up to `max_iterations` timed steps, and an untimed step before them."""
    ranks = Ranks(hook, world_size, TYPES[hook])
    for steps in range(1, ranks.max_iterations + 2):
        assert not ranks.accepts(steps), f"{steps - 1} all_reduces pass as {steps}"
        ranks.all_reduce()
        assert ranks.accepts(steps), f"{steps} all_reduces are wrong"
    for buffer in ranks.ranks[0].buffers:
        buffer.zero_()
    assert not ranks.accepts(ranks.max_iterations + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_averages_pass_in_every_round(world_size: int, dtype: torch.dtype) -> None:
    ranks = Ranks("avg", world_size, dtype)
    assert not ranks.accepts(1)
    for steps in range(1, ranks.max_iterations + 2):
        ranks.all_reduce()
        assert ranks.accepts(steps)
    ranks.ranks[1].buffers[0][2] *= 0.5
    assert not ranks.accepts(ranks.max_iterations + 1)


@pytest.mark.parametrize(("world_size", "least"), [(2, 64), (8, 64), (6, 4)])
def test_rounds_of_half_precision_are_long(world_size: int, least: int) -> None:
    assert Ranks("bf16", world_size, torch.bfloat16).max_iterations >= least
