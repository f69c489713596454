"""The rounds of a pool: their length, the order of the sets, and which are repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.machine.utilization import Recorder
from ddpperf.specs import AllReduceSpec, EpochSpec, Fault, SamplerSpec, Spec, TrainingSpec
from ddpperf.workers import pool as pool_module
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import ROUND_SECONDS, Pool, choose_iterations
from tests.canned import Canned, pool_of
from tests.generated import BOUNDED

LISTING = SamplerSpec(world_size=1, epoch_images=64)
EPOCH = EpochSpec(world_size=1, per_rank_batch_size=2, strategy="single", epoch_images=4)


# --- steps in a round


@pytest.mark.parametrize(
    ("step_seconds", "limit", "round_seconds", "iterations"),
    [
        (0.132, 1000, 0.05, 1),
        (0.0126, 1000, 0.05, 2),
        (0.0125, 1000, 0.05, 4),
        (20e-6, 4096, 0.05, 2048),
        (20e-6, 1, 0.05, 1),
        (0.0, 1000, 0.05, 512),
    ],
)
def test_round_lasts_about_as_long_as_requested(
    step_seconds: float, limit: int, round_seconds: float, iterations: int
) -> None:
    assert choose_iterations(step_seconds, limit, round_seconds) == iterations


@BOUNDED
@given(st.floats(1e-8, 1e4), st.integers(1, 10**6), st.sampled_from(sorted(ROUND_SECONDS.values())))
def test_iterations_are_largest_power_of_two_that_fits(
    step_seconds: float, limit: int, round_seconds: float
) -> None:
    iterations = choose_iterations(step_seconds, limit, round_seconds)
    assert iterations.bit_count() == 1
    assert iterations <= limit
    assert iterations == 1 or iterations * step_seconds <= round_seconds * (1 + 1e-12)
    assert 2 * iterations > limit or 2 * iterations * step_seconds > round_seconds * (1 - 1e-12)


def test_trial_rounds_grow_until_they_are_long(canned: Canned) -> None:
    canned.spread, canned.seconds = 0, lambda spec, name: 1e-3
    with pool_of(1, rounds=2) as pool:
        measured = pool.measure(LISTING)
    assert measured.iterations == 128, "0.15 s are 150 steps"
    assert canned.sampled == ["A1"] * (len([1, 4, 16, 64]) + 2)
    assert measured.all_step_seconds() == pytest.approx([1e-3, 1e-3])


# --- untimed steps


@pytest.mark.parametrize(
    ("milliseconds", "replicates", "untimed"),
    [(30, 2, [True] * 4 + [False] * 8), (8, 2, [True] * 12), (8, 1, [True] + [False] * 2)],
    ids=["long steps", "short steps", "one process set"],
)
def test_only_first_round_of_long_steps_has_an_untimed_one(
    canned: Canned, milliseconds: int, replicates: int, untimed: list[bool]
) -> None:
    canned.seconds = lambda spec, name: milliseconds / 1000
    sides = (Side(name="A"), Side(name="B"))[:replicates]
    with pool_of(1, sides=sides, replicates=replicates) as pool:
        pool.measure(LISTING)
    rounds = 3 * len(sides) * replicates
    assert [asked for _, asked in canned.asked][-rounds:] == untimed


@pytest.mark.parametrize(
    ("replicates", "rounds"),
    [(1, "A1B2 B2A1 A1B2"), (2, "A1B2B3A4 A1B2B3A4 A1B2B3A4"), (3, "A1B2B3A4A5B6 B6A5A4B3B2A1 A1B2")],
)
def test_no_process_set_of_one_side_alone_follows_itself(
    canned: Canned, replicates: int, rounds: str
) -> None:
    """If the order A B B A were reversed, the sets of A would follow themselves, and never those of B."""
    with pool_of(1, sides=(Side(name="A"), Side(name="B")), replicates=replicates) as pool:
        pool.measure(EPOCH)
        canned.sampled.clear()
        canned.seconds = lambda spec, name: 0.3
        pool.measure(EPOCH)
    assert "".join(canned.sampled).startswith(rounds.replace(" ", ""))


def test_steps_of_one_device_can_be_measured_on_the_first_only(canned: Canned) -> None:
    step = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
    for time_only, ranks in ((False, [[0], [1]] * 2), (True, [[0]] * 2)):
        with pool_of(2, rounds=2, time_only=time_only) as pool:
            measured = pool.measure(step)
        assert [asked for asked, _ in canned.asked][-len(ranks) :] == ranks
        assert len(measured.samples[0].seconds[0]) == len(ranks) // 2


def test_calls_are_compared_in_short_turns_on_a_cpu(canned: Canned) -> None:
    call = AllReduceSpec(world_size=2, nbytes=2**24)
    for sides, rounds in (((Side(name="A"),), 2), ((Side(name="A"), Side(name="B")), 8)):
        canned.sampled.clear()
        with pool_of(2, rounds=2, sides=sides) as pool:
            measured = pool.measure(call)
        assert [len(sample.seconds) for sample in measured.samples] == [rounds] * len(sides)
        assert rounds * measured.iterations == 32, "the turns together are as long as whole rounds"


# --- recorded rounds


class Recorded(Recorder):
    """A recorder that keeps the number of steps of each round."""

    def __init__(self, steps: list[int]) -> None:
        super().__init__()
        self.steps = steps

    @contextmanager
    def round(self, steps: int) -> Iterator[None]:
        self.steps.append(steps)
        yield


@pytest.mark.parametrize(("device", "untimed"), [("cpu", [1, 0, 0]), ("cuda", [1, 1, 1])])
def test_untimed_steps_use_energy_too(canned: Canned, device: str, untimed: list[int]) -> None:
    steps: list[int] = []
    step = TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp")
    with pool_of(2, device=device, recorder=lambda *_: Recorded(steps)) as pool:
        measured = pool.measure(step)
    assert [recorded - measured.iterations for recorded in steps] == untimed


def test_an_epoch_has_no_untimed_step(canned: Canned) -> None:
    steps: list[int] = []
    with pool_of(1, recorder=lambda *_: Recorded(steps)) as pool:
        pool.measure(EPOCH)
    assert set(steps) == {1}


def test_ranks_in_turn_are_not_recorded(canned: Canned) -> None:
    """The energy of all turns together would be that of several measurements."""
    recorded: list[Spec] = []

    def recorder(spec: Spec, *_: object) -> Recorder:
        recorded.append(spec)
        return Recorder()

    alone = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
    together = TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp")
    with pool_of(2, rounds=1, recorder=recorder) as pool:
        for spec in (alone, together):
            pool.measure(spec)
    assert recorded == [together]


# --- spoiled rounds


class Checks:
    """A `check_round` that keeps the numbers of rounds that it was called with."""

    def __init__(self) -> None:
        self.answer: Callable[[list[int], int], str] = lambda processes, done: ""
        self.done: list[int] = []

    def __call__(self, processes: list[int], done: int) -> str:
        self.done.append(done)
        return self.answer(processes, done)


@pytest.fixture
def checks() -> Checks:
    return Checks()


@pytest.fixture
def pool(canned: Canned, checks: Checks) -> Iterator[Pool]:
    """Two sides with one canned set each, and three rounds."""
    sides = Side(name="A"), Side(name="B")
    with pool_of(1, sides=sides, check_round=checks) as pool:
        yield pool


def test_spoiled_round_is_repeated_by_all_sets(pool: Pool, checks: Checks, canned: Canned) -> None:
    checks.answer = lambda processes, done: "hot" if checks.done == [0, 1, 2] else ""
    canned.spread = 0.1
    samples = pool.measure(LISTING).samples
    assert checks.done == [0, 1, 2, 2, 3]
    trials = canned.sampled.index("B2")
    rounds = canned.sampled[-8:]
    assert rounds == ["A1", "B2", *["B2", "A1"] * 2, "A1", "B2"]
    assert len(canned.sampled) == 2 * trials + 8
    for sample in samples:
        by_round = [canned.round_seconds(LISTING, sample.set, 0, trials + number) for number in (1, 3, 4)]
        assert [seconds / 128 for (seconds,) in sample.seconds] == pytest.approx(by_round)


def test_at_most_as_many_rounds_are_repeated(pool: Pool, checks: Checks) -> None:
    checks.answer = lambda processes, done: "hot"
    measured = pool.measure(LISTING)
    assert checks.done == [0, 1, 1, 1, 1, 2, 3]
    assert [len(sample.seconds) for sample in measured.samples] == [3, 3]


def test_long_steps_are_repeated_for_their_time(
    pool: Pool, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks.answer = lambda processes, done: "hot"
    monkeypatch.setattr(pool_module, "SHARED_WHOLE_SECONDS", 1e-9)
    measured = pool.measure(EPOCH)
    assert checks.done == [0, 1, 1]
    assert [len(sample.seconds) for sample in measured.samples] == [1, 1]


# --- the end of a measurement


def test_process_sets_finish_one_by_one_and_close_together(canned: Canned) -> None:
    """Some counters are times, so nothing else may run."""
    canned.counters = lambda spec, rank: {"loss": 2.0 + rank}
    with pool_of(2, sides=(Side(name="A"), Side(name="B"))) as pool:
        samples = pool.measure(TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp")).samples
    ended = "finish A1, answer A1, finish B2, answer B2, close A1, close B2, answer A1, answer B2"
    assert ", ".join(canned.ended) == ended
    assert [sample.counters for sample in samples] == [{"loss": (2.0, 3.0)}] * 2


def test_failure_of_both_sides_at_the_end_is_that_of_the_base(canned: Canned) -> None:
    fault = Fault(kind="raise", rank=0, command="close")
    with (
        pool_of(1, sides=(Side(name="B"), Side(name="A"))) as pool,
        pytest.raises(SetFailure, match="set A2"),
    ):
        pool.measure(TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single", fault=fault))
