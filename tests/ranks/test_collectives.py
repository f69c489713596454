"""The all_reduce measurement, its ranks simulated in process: a right sum passes the check, any wrong element does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.collectives.calls import AllReduce, Collective
from ddpperf.specs import OWN_ALGORITHMS, Algorithm, AllReduceSpec, CollectiveKind, CollectiveSpec
from ddpperf.workers.pool import Pool
from tests.project import Marked

WORLD_SIZES = [2, 3, 4, 8]


class Ranks:
    """`world_size` ranks in this process; their `step` meets in `all_reduce`, which sums all buffers in float32.

    order: in which the ranks' buffers are added, as a ring's chunks begin at different ranks.
    """

    def __init__(self, world_size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = AllReduceSpec(world_size=world_size, nbytes=4 * count)
        self.ranks = [AllReduce(spec, rank=rank, device=torch.device("cpu")) for rank in range(world_size)]
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
def test_right_sums_over_very_many_ranks_pass(
    world_size: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 13, monkeypatch)
    ranks.round(steps)
    ranks.ranks[0].end_round(steps)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 0.0, -1.0, "a bit"])
def test_a_single_wrong_element_is_found(
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


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_last_rounds_largest_sums_are_checked_too(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 100, monkeypatch)
    steps = ranks.ranks[0].max_iterations
    ranks.round(steps)
    assert ranks.ranks[0].buffer.isfinite().all()
    ranks.ranks[0].buffer[50] *= 1.01
    with pytest.raises(ArithmeticError, match=f"after {steps} steps element 50 is"):
        ranks.ranks[0].end_round(steps)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize(("done", "claimed"), [(0, 1), (1, 2), (3, 2), (3, 4), (6, 3)])
def test_a_missing_or_further_step_is_found(
    world_size: int, done: int, claimed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(world_size, 100, monkeypatch)
    ranks.round(done)
    with pytest.raises(ArithmeticError, match=f"all_reduce is wrong: after {claimed} steps"):
        ranks.ranks[0].end_round(claimed)


@pytest.mark.parametrize(
    ("world_size", "counted"),
    [(2, [0]), (2, [0, 1, 1]), (8, range(7)), (4, [0, 1, 2, 2])],
    ids=["one is missing", "one counts twice", "one of 8 is missing", "one stands in for another"],
)
def test_a_sum_over_other_ranks_is_found(
    world_size: int, counted: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    measurement = AllReduce(spec, rank=1, device=torch.device("cpu"))
    assert (measurement.buffer.numel(), measurement.buffer.dtype) == (count, torch.float32)
    assert measurement.buffer.nbytes == nbytes
    assert measurement.finish() == {}


# --- other collectives


@pytest.fixture(scope="module")
def pool(marked: Marked) -> Iterator[Pool]:
    with Pool(size=3, device="cpu", rounds=2, deadline_seconds=60) as pool:
        yield pool
    marked.assert_nothing_left()


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_every_collective_passes_its_own_check(pool: Pool, kind: CollectiveKind) -> None:
    assert pool.measure(CollectiveSpec(world_size=3, nbytes=12 * 100, kind=kind)).iterations >= 1


@pytest.mark.parametrize("algorithm", ["backend", *OWN_ALGORITHMS])
@pytest.mark.parametrize("in_place", [True, False])
def test_every_all_reduce_passes_its_own_check(pool: Pool, algorithm: Algorithm, in_place: bool) -> None:
    assert (
        pool.measure(
            AllReduceSpec(world_size=3, nbytes=4 * 100, algorithm=algorithm, in_place=in_place)
        ).iterations
        >= 1
    )


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_a_result_that_is_not_every_ranks_is_found(kind: CollectiveKind, rank: int) -> None:
    spec = CollectiveSpec(world_size=3, nbytes=12 * 100, kind=kind)
    work = Collective(spec, rank=rank, device=torch.device("cpu"))
    work.start_round()
    work.result.copy_(work.expected)
    work.end_round(1)
    work.result[-1] += 1
    with pytest.raises(
        ArithmeticError, match=rf"world_size=3-1200B-{kind}-eager is wrong: after 2 steps element \d+ is"
    ):
        work.end_round(2)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
def test_a_collective_that_did_nothing_is_found(kind: CollectiveKind) -> None:
    work = Collective(
        CollectiveSpec(world_size=3, nbytes=12 * 100, kind=kind), rank=2, device=torch.device("cpu")
    )
    work.result.copy_(work.expected)  # of the round before
    work.start_round()
    with pytest.raises(ArithmeticError, match="is wrong"):
        work.end_round(1)


def test_out_of_place_the_sum_is_that_of_one_call_however_many_there_were(
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
    ("make", "words"),
    [
        (
            lambda: CollectiveSpec(world_size=3, nbytes=16, kind="all_gather"),
            "nbytes must be a multiple of 12, a float32 for each",
        ),
        (
            lambda: CollectiveSpec(world_size=1, nbytes=16, kind="broadcast"),
            "world_size must be a whole number of at least 2",
        ),
        (
            lambda: AllReduceSpec(world_size=1, nbytes=16, algorithm="ring"),
            "world_size must be a whole number of at least 2",
        ),
        (
            lambda: AllReduceSpec(world_size=2, nbytes=6, algorithm="ring"),
            "nbytes must be a multiple of a float32's 4 bytes, got 6",
        ),
        (
            lambda: AllReduceSpec(world_size=2, nbytes=8, algorithm="ring", execution="graph"),
            "execution graph captures backend, one_shot,",
        ),
        (
            lambda: AllReduceSpec(world_size=2, nbytes=2**22 + 4, algorithm="low_latency"),
            "algorithm low_latency sums up to 4MiB, got 4194308 bytes; use two_shot",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "fields", [{"algorithm": "two_shot"}, {"algorithm": "low_latency"}, {"execution": "graph"}]
)
def test_what_only_gpus_can_is_refused_on_the_cpu(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this runs on the CPU"):
        AllReduce(AllReduceSpec(world_size=2, nbytes=400, **fields), rank=0, device=torch.device("cpu"))
