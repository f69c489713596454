"""The all_reduce measurement, its ranks simulated in process: a right sum passes the check, any wrong element does not."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.allreduce import BackendAllReduce
from ddpperf.specs import AllReduceSpec

WORLD_SIZES = [2, 3, 4, 8]


class Ranks:
    """`world_size` ranks in this process; their `step` meets in `all_reduce`, which sums all buffers in float32.

    order: in which the ranks' buffers are added, as a ring's chunks begin at different ranks.
    """

    def __init__(self, world_size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = AllReduceSpec(world_size=world_size, nbytes=4 * count)
        self.ranks = [BackendAllReduce(spec, rank=rank, device=torch.device("cpu")) for rank in range(world_size)]
        self.order = list(range(world_size))
        self._sum = torch.empty(0)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, buffer: Tensor) -> None:
        if buffer is self.ranks[0].buffer:  # the first to call: nobody's buffer has changed yet
            first, *others = (self.ranks[rank].buffer for rank in self.order)
            self._sum = first.clone()
            for other in others:
                self._sum += other
        buffer.copy_(self._sum)

    def round(self, steps: int) -> None:
        for rank in self.ranks:
            rank.start_round()
        for _ in range(steps):
            for rank in self.ranks:
                rank.step()

    def check(self, steps: int) -> None:
        for rank in self.ranks:
            rank.end_round(steps)


@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 7, 24])
def test_right_sums_pass_at_every_number_of_steps(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(world_size, 26, monkeypatch)
    for steps in range(1, ranks.ranks[0].max_iterations + 1):
        if steps <= 4 or steps.bit_count() == 1 or steps == ranks.ranks[0].max_iterations:
            ranks.order = random.Random(steps).sample(ranks.order, world_size)
            ranks.round(steps)
            ranks.check(steps)


@pytest.mark.parametrize(("world_size", "steps"), [(100, 8), (127, 4), (1000, 2)])
def test_right_sums_over_very_many_ranks_pass(world_size: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(world_size, 13, monkeypatch)
    ranks.round(steps)
    ranks.ranks[0].end_round(steps)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0.0, -1.0, "a bit"])
def test_a_single_wrong_element_is_found(world_size: int, wrong: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(world_size, 100, monkeypatch)
    for index in (0, 13, 99):
        ranks.round(4)
        right = ranks.ranks[1].buffer[index].item()
        ranks.ranks[1].buffer[index] = right * (1 + 2**-17) if isinstance(wrong, str) else wrong
        ranks.ranks[0].end_round(4)
        sentence = f"all_reduce is wrong: after 4 steps element {index} is .* where .* was expected"
        with pytest.raises(ArithmeticError, match=sentence):
            ranks.ranks[1].end_round(4)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_last_rounds_largest_sums_are_checked_too(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(world_size, 100, monkeypatch)
    steps = ranks.ranks[0].max_iterations
    ranks.round(steps)
    assert ranks.ranks[0].buffer.isfinite().all()
    ranks.ranks[0].buffer[50] *= 1.01
    with pytest.raises(ArithmeticError, match=f"after {steps} steps element 50 is"):
        ranks.ranks[0].end_round(steps)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize(("done", "claimed"), [(0, 1), (1, 2), (3, 2), (3, 4), (6, 3)])
def test_a_missing_or_further_step_is_found(world_size: int, done: int, claimed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(world_size, 100, monkeypatch)
    ranks.round(done)
    with pytest.raises(ArithmeticError, match=f"all_reduce is wrong: after {claimed} steps"):
        ranks.ranks[0].end_round(claimed)


@pytest.mark.parametrize(
    ("world_size", "counted"),
    [(2, [0]), (2, [0, 1, 1]), (8, range(7)), (4, [0, 1, 2, 2])],
    ids=["one is missing", "one counts twice", "one of 8 is missing", "one stands in for another"],
)
def test_a_sum_over_other_ranks_is_found(world_size: int, counted: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(world_size, 100, monkeypatch)
    ranks.order = list(counted)
    ranks.round(1)
    with pytest.raises(ArithmeticError, match="all_reduce is wrong: after 1 steps"):
        ranks.ranks[0].end_round(1)


def test_shifted_elements_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, 100, monkeypatch)
    ranks.round(1)
    ranks.ranks[0].buffer.copy_(ranks.ranks[0].buffer.roll(1))
    with pytest.raises(ArithmeticError, match="all_reduce is wrong: after 1 steps element"):
        ranks.ranks[0].end_round(1)


def test_each_round_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3, 10, monkeypatch)
    for steps in (5, 1, 3):
        ranks.round(steps)
        ranks.check(steps)


@pytest.mark.parametrize(("nbytes", "count"), [(4, 1), (1024, 256), (4 * 13 + 4, 14)])
def test_the_buffer_has_the_bytes_asked_for(nbytes: int, count: int) -> None:
    spec = AllReduceSpec(world_size=2, nbytes=nbytes)
    measurement = BackendAllReduce(spec, rank=1, device=torch.device("cpu"))
    assert (measurement.buffer.numel(), measurement.buffer.dtype) == (count, torch.float32)
    assert measurement.buffer.nbytes == nbytes
    assert measurement.finish() == {}
