"""The checks of collective calls, with simulated ranks: right results pass, a wrong element is
found.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.collectives import calls
from ddpperf.collectives.calls import AllReduce, Collective, RepeatedCall
from ddpperf.specs import AllReduceSpec, CollectiveSpec
from ddpperf.specs.collective import CallExecution, CollectiveKind, ElementType

WORLD_SIZES = [2, 3, 4, 8]
DTYPES: list[ElementType] = ["fp32", "bf16", "fp16"]


class Ranks:
    """Ranks in this process, whose `all_reduce` sums all buffers in their type.

    order: the order in which the ranks' buffers are added, as a ring's segments begin at different
    ranks.
    """

    def __init__(
        self, world_size: int, count: int, monkeypatch: pytest.MonkeyPatch, dtype: ElementType = "fp32"
    ) -> None:
        nbytes = calls.DTYPES[dtype].itemsize * count
        spec = AllReduceSpec(world_size=world_size, nbytes=nbytes, dtype=dtype)
        self.ranks = [AllReduce(spec, rank=rank, device=torch.device("cpu")) for rank in range(world_size)]
        self.order = list(range(world_size))
        self._sum, self._starting = torch.empty(0), False
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, buffer: Tensor) -> None:
        if self._starting or buffer is self.ranks[0].buffer:  # no buffer of this call has changed yet
            buffers = [rank.start if self._starting else rank.buffer for rank in self.ranks]
            first, *others = (buffers[rank] for rank in self.order)
            self._sum = first.clone()
            for other in others:
                self._sum += other
        buffer.copy_(self._sum)

    def round(self, steps: int) -> None:
        self._starting = True  # a round may begin with a call that is checked
        for rank in self.ranks:
            rank.start_round()
        self._starting = False
        for _ in range(steps):
            for rank in self.ranks:
                rank.step()

    def checked_round(self) -> None:
        self.round(1)
        self.ranks[0].end_round(1)

    def check(self, steps: int) -> None:
        for rank in self.ranks:
            rank.end_round(steps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 7, 12, 16, 24, 64])
def test_right_sums_pass_at_every_number_of_steps(
    world_size: int, dtype: ElementType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 26, monkeypatch, dtype)
    for steps in range(1, ranks.ranks[0].max_iterations + 1):
        if steps <= 4 or steps.bit_count() == 1 or steps == ranks.ranks[0].max_iterations:
            ranks.order = random.Random(steps).sample(ranks.order, world_size)
            ranks.round(steps)
            ranks.check(steps)


@pytest.mark.parametrize(("world_size", "steps"), [(100, 8), (127, 4), (1000, 2)])
def test_right_sums_over_very_many_ranks_pass(
    world_size: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 13, monkeypatch)
    ranks.round(steps)
    ranks.ranks[0].end_round(steps)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0.0, -1.0, "a bit"])
def test_single_wrong_element_is_found(
    world_size: int, wrong: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 100, monkeypatch)
    for index in (0, 13, 99):
        ranks.round(4)
        right = ranks.ranks[1].buffer[index].item()
        ranks.ranks[1].buffer[index] = right * (1 + 2**-17) if isinstance(wrong, str) else wrong
        ranks.ranks[0].end_round(4)
        sentence = f"all_reduce is wrong: after 4 steps element {index} is .* where .* was expected"
        with pytest.raises(ArithmeticError, match=sentence):
            ranks.ranks[1].end_round(4)


@pytest.mark.parametrize("execution", ["eager", "graph"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 3, 8, 9, 15, 16, 17, 24, 64])
def test_sums_of_a_whole_round_stay_in_range(
    world_size: int, dtype: ElementType, execution: CallExecution
) -> None:
    """A round has an untimed step, too."""
    fields: dict[str, Any] = {"world_size": world_size, "dtype": dtype, "execution": execution}
    if dtype == "fp16" and execution == "graph":
        with pytest.raises(ValueError, match=r"40 sums in place of .* ranks exceed fp16; use fewer ranks"):
            AllReduceSpec(nbytes=104, **fields)
        return
    spec = AllReduceSpec(nbytes=104, **fields)
    work = AllReduce(dataclasses.replace(spec, execution="eager"), rank=0, device=torch.device("cpu"))
    steps = max(1, spec.calls_in_range // spec.calls - 1) + 1
    largest = float(work.first_sum(work.start).max().double()) * float(world_size) ** (steps * spec.calls - 1)
    assert largest < torch.finfo(work.dtype).max


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_largest_possible_sums_are_checked(
    world_size: int, dtype: ElementType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 100, monkeypatch, dtype)
    steps = ranks.ranks[0].max_iterations
    ranks.round(steps)
    assert ranks.ranks[0].buffer.isfinite().all()
    ranks.ranks[0].buffer[50] *= 1.01 if dtype == "fp32" else 2
    with pytest.raises(ArithmeticError, match=f"after {steps} steps element 50 is"):
        ranks.ranks[0].end_round(steps)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize(("done", "claimed"), [(0, 1), (1, 2), (3, 2), (3, 4), (6, 3)])
def test_missing_or_extra_step_is_found(
    world_size: int, done: int, claimed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 100, monkeypatch)
    ranks.round(done)
    with pytest.raises(ArithmeticError, match=f"all_reduce is wrong: after {claimed} steps"):
        ranks.ranks[0].end_round(claimed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("world_size", "counted"),
    [(2, [0]), (2, [0, 1, 1]), (8, range(7)), (4, [0, 1, 2, 2]), (3, [0, 1])],
    ids=[
        "one is missing",
        "one counts twice",
        "one of 8 is missing",
        "one stands in for another",
        "one of 3 is missing",
    ],
)
def test_sum_over_other_ranks_is_found(
    world_size: int, counted: Sequence[int], dtype: ElementType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 100, monkeypatch, dtype)
    ranks.order = list(counted)
    with pytest.raises(ArithmeticError, match="all_reduce is wrong: after 1 steps"):
        ranks.checked_round()


def test_shifted_elements_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, 100, monkeypatch)
    ranks.round(1)
    ranks.ranks[0].buffer.copy_(ranks.ranks[0].buffer.roll(1))
    with pytest.raises(ArithmeticError, match="all_reduce is wrong: after 1 steps element"):
        ranks.ranks[0].end_round(1)


def test_a_large_result_is_checked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_CHECKED_AT_ONCE", 100)
    ranks = Ranks(2, 250, monkeypatch)
    ranks.round(4)
    ranks.check(4)
    ranks.ranks[0].buffer[249] *= 1.01
    with pytest.raises(ArithmeticError, match="after 4 steps element 249 is"):
        ranks.ranks[0].end_round(4)


# --- other collectives


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_wrong_result_of_a_collective_is_found(kind: CollectiveKind, rank: int, dtype: ElementType) -> None:
    spec = CollectiveSpec(world_size=3, nbytes=12 * 100, kind=kind, dtype=dtype)
    work = Collective(spec, rank=rank, device=torch.device("cpu"))
    work.start_round()
    work.result.copy_(work.expected)
    work.end_round(1)
    work.result[-1] += 1
    with pytest.raises(ArithmeticError, match=rf"kind={kind} is wrong: after 2 steps element \d+ is"):
        work.end_round(2)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_collective_without_effect_is_found(kind: CollectiveKind) -> None:
    work = Collective(
        CollectiveSpec(world_size=3, nbytes=12 * 100, kind=kind), rank=2, device=torch.device("cpu")
    )
    work.result.copy_(work.expected)  # of the previous round
    work.start_round()
    with pytest.raises(ArithmeticError, match="is wrong"):
        work.end_round(1)


def test_result_of_the_last_round_is_overwritten() -> None:
    """Algorithms in mapped memory may have their result outside the buffer."""
    spec = AllReduceSpec(world_size=2, nbytes=400, in_place=False)
    work = AllReduce(spec, rank=0, device=torch.device("cpu"))
    work.result = work.first_sum(work.start)
    work.end_round(1)
    work.start_round()
    with pytest.raises(ArithmeticError, match="all_reduce is wrong: after 1 steps"):
        work.end_round(1)


def test_sum_out_of_place_ignores_number_of_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = AllReduceSpec(world_size=2, nbytes=400, in_place=False)
    work = AllReduce(spec, rank=0, device=torch.device("cpu"))
    other = AllReduce(spec, rank=1, device=torch.device("cpu")).start
    monkeypatch.setattr(dist, "all_reduce", lambda buffer: buffer.add_(other))
    work.start_round()
    for steps in (1, 2, 900):
        for _ in range(min(steps, 3)):
            work.step()
        work.end_round(steps)
    assert torch.equal(work.start, AllReduce(spec, rank=0, device=torch.device("cpu")).start)


@pytest.mark.parametrize(
    "fields", [{"algorithm": "two_shot"}, {"algorithm": "low_latency"}, {"execution": "graph"}]
)
def test_gpu_only_call_is_refused_on_the_cpu(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this runs on the CPU"):
        AllReduce(AllReduceSpec(world_size=2, nbytes=400, **fields), rank=0, device=torch.device("cpu"))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_round_of_captured_calls_is_short_enough_to_be_launched_ahead(in_place: bool) -> None:
    spec = AllReduceSpec(world_size=2, nbytes=1024, execution="graph", in_place=in_place)
    assert RepeatedCall(spec, rank=0, device=torch.device("cuda", 0)).max_iterations == 8
