"""Which process sets a pool makes and replaces, and their rounds; the sets are canned."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.machine.utilization import Recorder
from ddpperf.specs import AllReduceSpec, EpochSpec, RunSpec, SamplerSpec, Spec, TrainingSpec
from ddpperf.workers import pool as pool_module
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import ROUND_SECONDS, Pool, choose_iterations
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.canned import Canned, died, pool_of, step_seconds
from tests.faults import failing
from tests.generated import BOUNDED

SMALL = AllReduceSpec(world_size=2, nbytes=1024)
SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
DDP = TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp")
LISTING = SamplerSpec(world_size=1, epoch_images=64)
EPOCH = EpochSpec(world_size=1, per_rank_batch_size=2, strategy="single", epoch_images=4)
SIDES = Side(name="A"), Side(name="B")


def test_candidate_sets_measure_the_candidate_spec(canned: Canned) -> None:
    canned.seconds = lambda spec, name: 0.06 if spec.delay_seconds else 0.03
    with pool_of(1, sides=SIDES) as pool:
        measured = pool.measure(SINGLE, replace(SINGLE, delay_seconds=0.09))
    assert measured.median_step_seconds() == pytest.approx({"A1": 0.03, "B2": 0.15}, rel=0.01)
    assert measured.iterations == 4, "the faster side's rounds last about 0.15 s"


def test_same_spec_is_measured_once_by_same_sets(canned: Canned) -> None:
    with pool_of(2) as pool:
        once = pool.measure_once(SMALL)
        assert pool.measure_once(SMALL) is once
        assert pool.measure(SMALL) is not once
        assert pool.measure_once(SMALL, SMALL) is not once
        pool.live_sets()[0].kill()
        assert pool.measure_once(SMALL) is not once
        assert pool.measure_once(SMALL) is pool.measure_once(SMALL)


def test_interrupted_end_of_a_set_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool no longer knows the larger process sets that it ends."""

    def interrupted(deadline_seconds: float) -> None:
        raise KeyboardInterrupt

    live = ProcessSet("A1", Side(), SetOptions(size=4, device="cpu", rounds=1, deadline_seconds=1))
    monkeypatch.setattr(live, "answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        live.close()
    assert not live.alive
    assert not live._folder.path.exists()


def test_more_ranks_than_gpus_are_refused(canned: Canned) -> None:
    sentence = "world_size=3 needs 3 ranks, but each process set has 2; pass --world-sizes 3"
    with pool_of(2, device="cuda") as pool, pytest.raises(ValueError, match=sentence):
        pool.measure(AllReduceSpec(world_size=3, nbytes=1024))


def test_more_ranks_get_larger_sets_until_needed(canned: Canned) -> None:
    """On a CPU. All measurements of one test are made by the same process sets."""
    large = AllReduceSpec(world_size=3, nbytes=1024)
    with pool_of(2, cores=[(0, 1), (2, 3)]) as pool:
        (usual,) = pool.measure_once(SMALL).samples
        (larger,) = pool.measure_once(large).samples
        (reference,) = pool.measure_once(SINGLE, ranks=3).samples
        assert (usual.set, larger.set, reference.set) == ("A1", "A2", "A2")
        assert list(map(len, (usual.seconds[0], larger.seconds[0], reference.seconds[0]))) == [2, 3, 3]
        (process_set,) = pool.live_sets(ranks=3)
        assert process_set.options.cores is None, "three ranks on the cores of two are not pinned"
        assert pool.measure_once(SMALL).samples == (usual,)
        assert not process_set.alive, "larger sets end before the next usual measurement"
        assert pool.live_sets()[0].options.cores == [(0, 1), (2, 3)]


def test_older_code_is_refused_at_once(canned: Canned) -> None:
    canned.setup = {"port": None, "environment": {}}
    with pool_of(1) as pool, pytest.raises(SetFailure, match="set A1 runs an older ddpperf"):
        pool.measure(SINGLE)


@pytest.mark.parametrize("error", [pytest.fail.Exception("Timeout"), OSError("Timeout")])
def test_all_sets_are_replaced_after_a_timeout(canned: Canned, error: BaseException) -> None:
    """Another set may still owe the answer to a command that nobody waits for any more."""

    def timed_out(spec: Spec, name: str) -> float:
        raise error

    with pool_of(2, replicates=2) as pool:
        pool.measure(SMALL)
        canned.seconds = timed_out
        with pytest.raises(type(error), match="Timeout"):
            pool.measure(SMALL)
        canned.seconds = step_seconds
        assert [sample.set for sample in pool.measure(SMALL).samples] == ["A3", "A4"]


@pytest.mark.parametrize("command", ["open", "close"])
def test_base_is_named_where_both_sides_fail(canned: Canned, command: str) -> None:
    canned.fails_at, canned.seconds = command, lambda spec, name: 0.01
    with pool_of(1, sides=SIDES[::-1]) as pool, pytest.raises(SetFailure, match="of set A2 ") as failed:
        pool.measure(failing("raises", world_size=1))
    assert failed.value.set_name == "A2"


@pytest.mark.parametrize("sides", [SIDES, SIDES[::-1]], ids=["base first", "candidate first"])
def test_step_that_fails_on_both_sides_in_a_round_is_of_both(
    canned: Canned, sides: tuple[Side, Side]
) -> None:
    """Such as a loss that becomes NaN: which side samples first is random."""
    with pool_of(1, sides=sides) as pool, pytest.raises(SetFailure, match="of set A") as failed:
        pool.measure(failing("raises", world_size=1))
    assert failed.value.sides == {"A", "B"}


@pytest.mark.parametrize("failing_side", ["A", "B"])
def test_failure_of_one_side_is_not_lost(failing_side: str) -> None:
    """The other side has answered."""

    def answers(side: str) -> dict[int, dict[str, float]]:
        if side == failing_side:
            raise died(f"{side}1")
        return {0: {}}

    sets: Any = [
        SimpleNamespace(name=side, answers=lambda progress, side=side: answers(side)) for side in "AB"
    ]
    with pytest.raises(SetFailure, match=f"of set {failing_side}1 exited with status 7"):
        pool_module._wait(sets, None)


@pytest.mark.parametrize("spec", [SINGLE, SMALL, EPOCH], ids=lambda spec: spec.measurement)
def test_base_alone_is_measured_as_beside_the_candidate(canned: Canned, spec: Spec) -> None:
    """In as many rounds of as many steps, whatever its own time of a step."""
    with pool_of(2, sides=SIDES[::-1], replicates=2) as pool:
        beside = pool.measure(spec, replace(spec, delay_seconds=1e-3))
        candidates = [live for live in pool.live_sets() if live.side.name == "B"]
        canned.seconds = lambda spec, name: 1e-5
        alone = pool.measure_base_alone(beside)
        assert not any(live.alive for live in candidates)
        assert [sample.set for sample in alone.samples] == ["A2", "A3"]
        assert {len(sample.seconds) for sample in alone.samples} == {len(beside.samples[0].seconds)}
        assert (alone.spec, alone.candidate_spec, alone.iterations) == (spec, None, beside.iterations)
        assert [sample.set for sample in pool.measure(spec).samples] == ["B5", "A2", "A3", "B6"]


def test_larger_group_maps_memory_on_fresh_sets(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that a smaller group left out would wait in a larger one forever."""
    monkeypatch.setattr(AllReduceSpec, "maps_memory", property(lambda spec: spec.nbytes == 2048))
    mapped = {N: AllReduceSpec(world_size=N, nbytes=2048) for N in (2, 3)}
    with pool_of(3) as pool:

        def set_of(spec: AllReduceSpec) -> str:
            (sample,) = pool.measure_once(spec).samples
            return sample.set

        assert [set_of(mapped[3]), set_of(mapped[2])] == ["A1", "A1"], "a smaller group may follow"
        assert set_of(AllReduceSpec(world_size=3, nbytes=1024)) == "A1", "it maps nothing"
        assert set_of(mapped[3]) == "A1", "it was measured before"
        assert set_of(replace(mapped[3], in_place=False)) == "A2"
        assert set_of(mapped[2]) == "A2"
        assert pool.sets_made == 2
        ((opened, _),) = pool.open(mapped[3])
        assert opened.name == "A3"


@pytest.mark.parametrize(
    ("sides", "time_only", "kernels"),
    [(SIDES[:1], False, [False]), (SIDES, True, [False, False]), (SIDES, False, [True, True])],
)
def test_kernels_are_listed_where_process_sets_are_compared(
    canned: Canned, sides: tuple[Side, ...], time_only: bool, kernels: list[bool]
) -> None:
    canned.kernels = lambda spec, name: "a" * 12
    with pool_of(1, sides=sides, time_only=time_only) as pool:
        assert [bool(sample.kernels) for sample in pool.measure(SINGLE).samples] == kernels


def test_expected_seconds_follow_sets_and_rounds(canned: Canned) -> None:
    """Steps take all rounds on each process set; a whole training is one round on each.

    An A/B run times 16 steps of 12 ms in a round, and a run without sides 8.
    """
    training = RunSpec(
        world_size=1,
        per_rank_batch_size=2,
        strategy="single",
        input="device",
        epochs=1,
        epoch_images=64,
        test_images=8,
        rate=0.1,
    )
    with pool_of(1) as alone, pool_of(1, sides=SIDES, replicates=3) as beside:
        beside.options = replace(beside.options, rounds=5)
        steps, whole = alone.measure(SINGLE), alone.measure(training)
        assert beside.expected_seconds(steps) == pytest.approx(6 * 5 / 3 * 16 / 8 * steps.counted_seconds())
        assert beside.expected_seconds(whole) == pytest.approx(6 * whole.counted_seconds())
        compiled = replace(steps, spec=replace(SINGLE, execution="compile"))
        assert beside.expected_seconds(compiled) - beside.expected_seconds(steps) == pytest.approx(6 * 20)


@pytest.mark.parametrize(("time_only", "turns"), [(False, 4), (True, 1)])
def test_expected_seconds_count_the_devices_in_turn(canned: Canned, time_only: bool, turns: int) -> None:
    with pool_of(4) as pool:
        measured = pool.measure(SINGLE)
        pool.options = replace(pool.options, time_only=time_only)
        expected = measured.counted_seconds() * turns / 4
        assert pool.expected_seconds(measured) == pytest.approx(expected, rel=0.01)


def test_known_step_times_need_no_trial_rounds(canned: Canned) -> None:
    call = AllReduceSpec(world_size=2, nbytes=2**24)
    for parts, steps, sides in ((1, 8, SIDES[:1]), (call.compared_parts["cpu"], 8, SIDES)):
        canned.sampled.clear()
        with pool_of(2, rounds=3, sides=sides, step_seconds={call: 0.15 / 8}) as pool:
            assert pool.measure(call).iterations == steps // parts
        assert len(canned.sampled) == 3 * parts * len(sides)


# --- steps in a round


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


@pytest.mark.parametrize(
    ("device", "execution", "milliseconds", "plain", "compared"),
    [
        ("cpu", "eager", 19, 4, 16),
        ("cpu", "eager", 26, 4, 4),  # 16 steps would take more than 0.4 s
        ("cuda", "eager", 6, 8, 16),
        ("cuda", "graph", 6, 32, 16),
        ("cuda", "graph", 1, 32, 32),
        ("cuda", "graph", 13, 16, 2),  # 32 steps would take more than 0.4 s, and 16 more than 0.1 s
        ("cuda", "graph", 70, 4, 1),
    ],
)
def test_rounds_have_enough_steps_for_a_rare_stall(
    canned: Canned, device: str, execution: Any, milliseconds: float, plain: int, compared: int
) -> None:
    spec = replace(SINGLE, execution=execution)
    canned.seconds = lambda spec, name: milliseconds / 1e3
    for sides, steps in ((SIDES[:1], plain), (SIDES, compared)):
        with pool_of(1, device=device, sides=sides) as pool:
            measured = pool.measure(spec)
            assert measured.iterations == steps
            assert pool.expected_seconds(measured) == pytest.approx(measured.counted_seconds(), rel=0.01)


def test_devices_that_take_turns_share_the_steps_of_a_round(canned: Canned) -> None:
    canned.seconds = lambda spec, name: 6e-3
    with pool_of(4, device="cuda") as pool:
        assert pool.measure(replace(SINGLE, execution="graph")).iterations == 32 / 4


def test_calls_in_one_graph_are_as_many_steps(canned: Canned) -> None:
    canned.seconds = lambda spec, name: 3.2e-3
    with pool_of(2, device="cuda") as pool:
        measured = pool.measure(AllReduceSpec(world_size=2, nbytes=2**30, execution="graph"))
    assert measured.iterations == 2, "40 calls"


def test_trial_rounds_grow_until_they_are_long(canned: Canned) -> None:
    canned.spread, canned.seconds = 0, lambda spec, name: 1e-3
    with pool_of(1, rounds=2) as pool:
        measured = pool.measure(LISTING)
    assert measured.iterations == 128, "0.15 s are 150 steps"
    assert canned.sampled == ["A1"] * (len([1, 4, 16, 64]) + 2)
    assert measured.all_step_seconds() == pytest.approx([1e-3, 1e-3])


def test_slowest_rank_times_trial_rounds(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canned, "round_seconds", lambda spec, name, rank, number: (1e-3, 4e-3)[rank])
    with pool_of(2) as pool:
        assert pool.measure(DDP).iterations == 32, "0.15 s are 37 steps of 4 ms"


# --- untimed steps


@pytest.mark.parametrize(
    ("milliseconds", "replicates", "untimed"),
    [(30, 2, [False] * 12), (8, 2, [True] * 12), (8, 1, [True] + [False] * 2)],
    ids=["long steps", "short steps", "one process set"],
)
def test_long_steps_need_no_untimed_one(
    canned: Canned, milliseconds: int, replicates: int, untimed: list[bool]
) -> None:
    canned.seconds = lambda spec, name: milliseconds / 1000
    sides = SIDES[:replicates]
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
    with pool_of(1, sides=SIDES, replicates=replicates) as pool:
        pool.measure(EPOCH)
        canned.sampled.clear()
        canned.seconds = lambda spec, name: 0.3
        pool.measure(EPOCH)
    assert "".join(canned.sampled).startswith(rounds.replace(" ", ""))


def test_steps_of_one_device_can_be_measured_on_the_first_only(canned: Canned) -> None:
    for time_only, ranks in ((False, [[0], [1]] * 2), (True, [[0]] * 2)):
        with pool_of(2, rounds=2, time_only=time_only) as pool:
            measured = pool.measure(SINGLE)
        assert [asked for asked, _ in canned.asked][-len(ranks) :] == ranks
        assert len(measured.samples[0].seconds[0]) == len(ranks) // 2


@pytest.mark.parametrize("time_only", [True, False])
def test_a_comparison_of_times_has_the_costs_of_one_base(canned: Canned, time_only: bool) -> None:
    """The other process sets end their measurements at the same time, so their costs are too high."""
    canned.counters = lambda spec, rank: {"device_seconds": 1e-3, "peak_memory_bytes": 5.0}
    with pool_of(2, sides=SIDES[::-1], replicates=2, time_only=time_only) as pool:
        measured = pool.measure(DDP)
    timed = [sample.side for sample in measured.samples if "device_seconds" in sample.counters]
    assert sorted(timed) == (["A"] if time_only else ["A", "A", "B", "B"])
    assert all(sample.counters["peak_memory_bytes"] == (5.0, 5.0) for sample in measured.samples)


# --- recorded rounds


class Recorded(Recorder):
    def __init__(self, steps: list[int]) -> None:
        super().__init__()
        self.steps = steps

    @contextmanager
    def round(self, steps: int) -> Iterator[None]:
        self.steps.append(steps)
        yield


@pytest.mark.parametrize(("device", "untimed"), [("cpu", [0, 0, 0]), ("cuda", [1, 1, 1])])
def test_untimed_steps_use_energy_too(canned: Canned, device: str, untimed: list[int]) -> None:
    steps: list[int] = []
    with pool_of(2, device=device, recorder=lambda *_: Recorded(steps)) as pool:
        measured = pool.measure(DDP)  # 20 ms on a CPU need no untimed step
    assert [recorded - measured.iterations for recorded in steps] == untimed


def test_an_epoch_has_no_untimed_step(canned: Canned) -> None:
    steps: list[int] = []
    with pool_of(1, recorder=lambda *_: Recorded(steps)) as pool:
        pool.measure(EPOCH)
    assert set(steps) == {1}


def test_ranks_that_measure_at_once_are_recorded(canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those in turn: the energy of all turns together would be that of several measurements."""
    recorded: list[tuple[Spec, list[int], bool]] = []

    def recorder(*asked: Any) -> Recorder:
        recorded.append(asked)
        return Recorder()

    monkeypatch.setattr(ProcessSet, "pids", {0: 10, 1: 11})
    with pool_of(2, rounds=1, recorder=recorder) as pool:
        for spec in (SINGLE, DDP, EPOCH):
            pool.measure(spec)
    assert recorded == [(DDP, [10, 11], True), (EPOCH, [10], True)]


def test_idle_load_is_counted_of_known_processes_beside_others(
    canned: Canned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node has its own processes. tests/ranks has the CPU time that is counted."""
    for pids in ({0: os.getpid()}, {0: os.getpid(), 1: os.getpid()}):
        monkeypatch.setattr(ProcessSet, "pids", pids)
        with pool_of(2, sides=SIDES) as pool:
            samples = pool.measure(LISTING).samples
            assert ["idle_cpu_seconds" in sample.counters for sample in samples] == [len(pids) == 2] * 2
            assert "idle_cpu_seconds" not in pool.measure_alone(LISTING).samples[0].counters


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
    with pool_of(1, sides=SIDES, check_round=checks) as pool:
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
    with pool_of(2, sides=SIDES) as pool:
        samples = pool.measure(DDP).samples
    ended = "finish A1, answer A1, finish B2, answer B2, close A1, close B2, answer A1, answer B2"
    assert ", ".join(canned.ended) == ended
    assert [sample.counters for sample in samples] == [{"loss": (2.0, 3.0)}] * 2
