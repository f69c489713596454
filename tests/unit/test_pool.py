"""Which process sets a pool makes, replaces and measures on; the sets are canned."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ddpperf.instruments.kernels import other_kernels
from ddpperf.specs import AllReduceSpec, Fault, RunSpec, Spec, TrainingSpec
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from tests.canned import Canned, pool_of, step_seconds

SMALL = AllReduceSpec(world_size=2, nbytes=1024)
SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
SIDES = Side(name="A"), Side(name="B")


def test_replicates_are_separate_sets(canned: Canned) -> None:
    with pool_of(1, replicates=2) as pool:
        measured = pool.measure(SINGLE)
    assert [(sample.set, sample.side, len(sample.seconds)) for sample in measured.samples] == [
        ("A1", "A", 3),
        ("A2", "A", 3),
    ]
    assert set(measured.median_step_seconds()) == {"A1", "A2"}


def test_replicates_of_sides_start_in_mirrored_order(canned: Canned) -> None:
    with pool_of(1, sides=SIDES, replicates=2, sets_made=3) as pool:
        assert [live.name for live in pool.live_sets()] == ["A4", "B5", "B6", "A7"]


def test_candidate_sets_measure_the_candidate_spec(canned: Canned) -> None:
    canned.seconds = lambda spec, name: 0.02 if spec.delay_seconds else 0.01
    with pool_of(1, sides=SIDES) as pool:
        measured = pool.measure(SINGLE, replace(SINGLE, delay_seconds=0.03))
    assert measured.median_step_seconds() == pytest.approx({"A1": 0.01, "B2": 0.05}, rel=0.01)


def test_same_spec_is_measured_once_by_same_sets(canned: Canned) -> None:
    with pool_of(2) as pool:
        once = pool.measure_once(SMALL)
        assert pool.measure_once(SMALL) is once
        assert pool.measure(SMALL) is not once
        assert pool.measure_once(SMALL, SMALL) is not once
        pool.live_sets()[0].kill()
        assert pool.measure_once(SMALL) is not once
        assert pool.measure_once(SMALL) is pool.measure_once(SMALL)


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


def test_failed_set_is_replaced_under_a_new_name(canned: Canned) -> None:
    with pool_of(2) as pool:
        with pytest.raises(SetFailure, match="rank 1 of set A1 was killed by SIGKILL"):
            pool.measure(replace(SMALL, fault=Fault(kind="kill", rank=1)))
        assert [sample.set for sample in pool.measure(SMALL).samples] == ["A2"]


def test_all_sets_are_replaced_after_a_timeout(canned: Canned) -> None:
    """Another set may still owe the answer to a command that nobody waits for any more."""

    def timed_out(spec: Spec, name: str) -> float:
        pytest.fail("Timeout", pytrace=False)

    with pool_of(2, replicates=2) as pool:
        pool.measure(SMALL)
        canned.seconds = timed_out
        with pytest.raises(pytest.fail.Exception, match="Timeout"):
            pool.measure(SMALL)
        canned.seconds = step_seconds
        assert [sample.set for sample in pool.measure(SMALL).samples] == ["A3", "A4"]


def test_base_is_named_where_both_sides_fail(canned: Canned) -> None:
    failing = replace(SINGLE, fault=Fault(kind="raise", rank=0, command="open"))
    with pool_of(1, sides=SIDES[::-1]) as pool, pytest.raises(SetFailure, match="of set A2 ") as failed:
        pool.measure(failing)
    assert failed.value.set_name == "A2"


def test_measuring_alone_ends_other_sets(canned: Canned) -> None:
    with pool_of(1, replicates=2) as pool:
        first, second = pool.live_sets()
        (sample,) = pool.measure_alone(SINGLE).samples
        assert sample.set == first.name == "A1"
        assert first.alive
        assert not second.alive
        assert [sample.set for sample in pool.measure(SINGLE).samples] == ["A1", "A3"]


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


def test_set_with_other_kernels_is_named(canned: Canned) -> None:
    canned.kernels = lambda spec, name: "b" * 12 if name == "A2" else "a" * 12
    with pool_of(1, replicates=3) as pool:
        assert other_kernels(pool.measure(SINGLE)) == ["process set A2 ran other kernels than all others"]


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


def test_closed_pool_leaves_no_folder(
    canned: Canned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("ddpperf.io.private_folders.MOST_ROOT_BYTES", 1000)
    pool = pool_of(1)
    pool.live_sets()
    assert list(tmp_path.iterdir())
    pool.close()
    pool.close()
    assert not list(tmp_path.iterdir())


def test_expected_seconds_follow_sets_and_rounds(canned: Canned) -> None:
    """Steps take all rounds on each process set; a whole training is one round on each."""
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
        assert beside.expected_seconds(steps) == pytest.approx(6 * 5 / 3 * steps.counted_seconds())
        assert beside.expected_seconds(whole) == pytest.approx(6 * whole.counted_seconds())


@pytest.mark.parametrize(("time_only", "turns"), [(False, 4), (True, 1)])
def test_expected_seconds_count_the_devices_in_turn(canned: Canned, time_only: bool, turns: int) -> None:
    with pool_of(4) as pool:
        measured = pool.measure(SINGLE)
        pool.options = replace(pool.options, time_only=time_only)
        expected = measured.counted_seconds() * turns / 4
        assert pool.expected_seconds(measured) == pytest.approx(expected, rel=0.01)


def test_known_step_times_need_no_trial_rounds(canned: Canned) -> None:
    call = AllReduceSpec(world_size=2, nbytes=2**24)
    for parts, sides in ((1, SIDES[:1]), (call.compared_parts["cpu"], SIDES)):
        canned.sampled.clear()
        with pool_of(2, rounds=3, sides=sides, step_seconds={call: 0.15 / 8}) as pool:
            assert pool.measure(call).iterations == 8 // parts
        assert len(canned.sampled) == 3 * parts * len(sides)
