"""The rounds of a pool: how many steps each has, which are measured again, and which kernels their sets ran."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddpperf
from ddpperf.instruments.kernels import other_kernels
from ddpperf.machine import gpu_watch
from ddpperf.machine.gpu_watch import GpuState, GpuWatch
from ddpperf.specs import AllReduceSpec, EpochSpec, Fault, SamplerSpec, TrainingSpec
from ddpperf.workers import pool as pool_module
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.rounds import ROUND_SECONDS, choose_iterations
from tests.generated import BOUNDED
from tests.project import Marked

LISTING = SamplerSpec(world_size=1, epoch_images=64)
SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
EPOCH = EpochSpec(world_size=1, per_rank_batch_size=2, strategy="single", epoch_images=4)


# --- steps in a round


@pytest.mark.parametrize(
    ("step_seconds", "limit", "round_seconds", "iterations"),
    [
        (0.132, 1000, 0.05, 1),
        (0.05, 1000, 0.05, 1),
        (0.025, 1000, 0.05, 2),
        (0.0126, 1000, 0.05, 2),
        (0.0125, 1000, 0.05, 4),
        (0.0125, 1000, 0.3, 16),
        (20e-6, 1000, 0.05, 512),
        (20e-6, 4096, 0.05, 2048),
        (20e-6, 4096, 0.01, 256),
        (20e-6, 1, 0.05, 1),
        (0.0, 1000, 0.05, 512),
        (math.inf, 1000, 0.05, 1),
    ],
)
def test_a_round_lasts_about_as_long_as_asked_for(
    step_seconds: float, limit: int, round_seconds: float, iterations: int
) -> None:
    assert choose_iterations(step_seconds, limit, round_seconds) == iterations


@BOUNDED
@given(st.floats(1e-8, 1e4), st.integers(1, 10**6), st.sampled_from(sorted(ROUND_SECONDS.values())))
def test_iterations_are_the_largest_power_of_two_that_fits(
    step_seconds: float, limit: int, round_seconds: float
) -> None:
    iterations = choose_iterations(step_seconds, limit, round_seconds)
    assert iterations.bit_count() == 1
    assert iterations <= limit
    assert iterations == 1 or iterations * step_seconds <= round_seconds * (1 + 1e-12)
    assert 2 * iterations > limit or 2 * iterations * step_seconds > round_seconds * (1 - 1e-12)


# --- spoiled rounds


class Looks:
    """What the pool is told of its rounds; keeps the numbers that it was asked with."""

    def __init__(self) -> None:
        self.answer: Callable[[list[int], int], str] = lambda processes, done: ""
        self.done: list[int] = []

    def __call__(self, processes: list[int], done: int) -> str:
        self.done.append(done)
        return self.answer(processes, done)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def module_looks() -> Looks:
    return Looks()


@pytest.fixture
def looks(module_looks: Looks) -> Looks:
    module_looks.done.clear()
    return module_looks


@pytest.fixture(scope="module")
def pool(marked: Marked, module_looks: Looks, logs: Path) -> Iterator[Pool]:
    """A set a side, and three rounds."""
    sides = Side(name="A"), Side(name="B")
    with Pool(
        size=1,
        device="cpu",
        rounds=3,
        deadline_seconds=60,
        sides=sides,
        log_folder=logs,
        check_round=module_looks,
    ) as pool:
        yield pool
    marked.assert_nothing_left()


def test_a_spoiled_round_is_measured_again_by_all_sets_in_the_same_order(
    pool: Pool, looks: Looks, logs: Path
) -> None:
    looks.answer = lambda processes, done: "hot" if looks.done == [0, 1, 2] else ""
    samples = pool.measure(LISTING).samples
    assert looks.done == [0, 1, 2, 2, 3]
    names = [sample.set for sample in samples]
    lines = [
        json.loads(line) | {"set": name} for name in names for line in (logs / f"{name}-rank0.log").open()
    ]
    rounds = sorted(lines, key=lambda each: each["ended"])[-8:]  # after those that calibrate
    assert [each["set"] for each in rounds] == ["A1", "B2", *["B2", "A1"] * 2, "A1", "B2"]
    del rounds[2:4]
    for sample in samples:
        assert sample.seconds == tuple((each["seconds"],) for each in rounds if each["set"] == sample.set)


def test_as_many_rounds_as_asked_for_are_measured_again_and_no_more(pool: Pool, looks: Looks) -> None:
    looks.answer = lambda processes, done: "hot"
    measured = pool.measure(LISTING)
    assert looks.done == [0, 1, 1, 1, 1, 2, 3]
    assert [len(sample.seconds) for sample in measured.samples] == [3, 3]


def test_long_wholes_are_measured_again_for_as_long_as_they_are_measured(
    pool: Pool, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks.answer = lambda processes, done: "hot"
    monkeypatch.setattr(pool_module, "WHOLE_SECONDS", 1e-9)
    measured = pool.measure(EPOCH)
    assert looks.done == [0, 1, 1]
    assert [len(sample.seconds) for sample in measured.samples] == [1, 1]


@pytest.mark.parametrize(
    ("hot", "told"),
    [
        (
            ["temperature", "", "temperature", ""],
            ["2 spoiled rounds were measured again: GPU 0 was throttled (temperature)"],
        ),
        (
            ["", "power cap", "power cap", ""],
            ["GPU 0 was throttled (power cap) during 2 of 3 rounds"],
        ),
        (["", "", "power cap"], ["1 spoiled round was measured again: GPU 0 was throttled (power cap)"]),
        (
            ["temperature", "power brake"] * 3,
            [
                "GPU 0 was throttled (power brake, temperature) during 3 of 3 rounds",
                "3 spoiled rounds were measured again: GPU 0 was throttled (temperature); GPU 0 was throttled (power brake)",
            ],
        ),
        (
            [""] * 2 + ["power cap"] * 4,  # from the third on it is in half of all that were measured
            [
                "GPU 0 was throttled (power cap) during 1 of 3 rounds",
                "1 spoiled round was measured again: GPU 0 was throttled (power cap)",
            ],
        ),
    ],
)
def test_what_the_watch_saw_is_a_doubt_in_rounds_that_count_and_else_a_note(
    pool: Pool, looks: Looks, hot: list[str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = ["", "temperature", *hot, *[""] * 6]  # when the watch is made, and before the first round
    readings = deque(
        GpuState(monotonic_seconds=at, reasons=frozenset({each} - {""})) for at, each in enumerate(reasons)
    )
    monkeypatch.setattr(gpu_watch, "_handles", lambda uuids: {0: readings})
    monkeypatch.setattr(gpu_watch, "read_state", lambda handle: handle.popleft())
    watch = GpuWatch(["GPU-a"])
    looks.answer = watch.look
    pool.measure(LISTING)
    assert [note.text for note in watch.warnings()] == told


# --- kernels

OTHER_CONVOLUTIONS = "import torch; torch.backends.mkldnn.set_flags(False)"
OF_ONE_PROCESS = f"""
import os, pathlib
with open(pathlib.Path(__file__).with_name("which"), "x") as file:
    print(os.getpid(), file=file)
    {OTHER_CONVOLUTIONS}
"""


def customized(folder: Path, code: str, name: str = "A") -> Side:
    """A side whose ranks run `code` first of all."""
    (folder / "sitecustomize.py").write_text(code)
    return Side(name=name, environment={"PYTHONPATH": str(folder)})


def test_equal_code_has_equal_kernels_and_other_work_or_settings_others(
    marked: Marked, tmp_path: Path
) -> None:
    sides = Side(name="A"), customized(tmp_path, OTHER_CONVOLUTIONS, name="B")
    with Pool(size=1, device="cpu", rounds=1, deadline_seconds=60, sides=sides, replicates=2) as pool:
        measured = pool.measure(SINGLE)
        base, candidate, *again = [sample.kernels for sample in measured.samples]
        (other, *_) = [sample.kernels for sample in pool.measure(replace(SINGLE, input="device")).samples]
    assert all(re.fullmatch("[0-9a-f]{12}", kernels) for kernels in (base, candidate, other))
    assert again == [candidate, base], "sets begin in the order A B B A"
    assert len({base, candidate, other}) == 3
    assert measured.different_kernels() == {}


def test_a_set_that_ran_other_kernels_than_its_replicates_is_named(marked: Marked, tmp_path: Path) -> None:
    sides = (customized(tmp_path, OF_ONE_PROCESS),)
    with Pool(size=1, device="cpu", rounds=1, deadline_seconds=60, sides=sides, replicates=3) as pool:
        process = int((tmp_path / "which").read_text()) if pool.live_sets() else 0
        (other,) = [live.name for live in pool.live_sets() if live.ranks[0].pid == process]
        assert other_kernels(pool.measure(EPOCH)) == [f"set {other} ran other kernels than the rest"]


def test_where_both_sides_fail_the_first_is_named(marked: Marked) -> None:
    """In whatever order their sets stand."""
    failing = replace(SINGLE, fault=Fault(kind="raise", rank=0, command="open"))
    sides = Side(name="B"), Side(name="A")
    pool = Pool(size=1, device="cpu", rounds=1, deadline_seconds=60, sides=sides)
    with pool, pytest.raises(SetFailure) as failed:
        pool.measure(failing)
    assert failed.value.set_name == "A2"


def test_a_pool_goes_on_counting_where_another_ended(marked: Marked) -> None:
    with Pool(size=1, device="cpu", rounds=1, deadline_seconds=60, sets_made=3) as pool:
        assert [each.name for each in pool.live_sets()] == ["A4"]
        assert pool.sets_made == 4


def test_all_ranks_of_a_group_run_the_step_whose_kernels_are_told(marked: Marked) -> None:
    with Pool(size=2, device="cpu", rounds=1, deadline_seconds=60, replicates=2) as pool:
        one, other = pool.measure(replace(SINGLE, world_size=2, strategy="ddp")).samples
        assert one.kernels == other.kernels != ""
        assert [each.kernels for each in pool.measure(AllReduceSpec(world_size=2, nbytes=1024)).samples] == [
            "",
            "",
        ]


def test_another_ddpperf_is_not_asked_for_kernels(marked: Marked, tmp_path: Path) -> None:
    """An older one does not know what that is."""
    copied = tmp_path / "ddpperf"
    shutil.copytree(Path(ddpperf.__file__).parent, copied)
    rank = copied / "workers" / "rank.py"
    text = rank.read_text().replace(", kernels: bool = False", "").replace("if kernels and", "if False and")
    rank.write_text(text.replace(', "kernels": ran}', "}"))
    sides = Side(name="A"), Side(name="B", root=tmp_path)
    with Pool(size=1, device="cpu", rounds=1, deadline_seconds=60, sides=sides) as pool:
        ours, theirs = pool.measure(SINGLE).samples
    assert ours.kernels
    assert theirs.kernels == ""


# --- sets that ranks' histories make useless


def test_a_larger_group_maps_its_memory_in_fresh_sets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a smaller group's ranks, the others would wait for ever; what was measured before is taken from there."""
    monkeypatch.setattr(AllReduceSpec, "maps_memory", property(lambda spec: spec.nbytes == 2048))
    mapped = {N: AllReduceSpec(world_size=N, nbytes=2048) for N in (2, 3)}
    with Pool(size=3, device="cpu", rounds=1, deadline_seconds=60) as pool:

        def set_of(spec: AllReduceSpec) -> str:
            (sample,) = pool.measure_once(spec).samples
            return sample.set

        assert [set_of(mapped[3]), set_of(mapped[2])] == ["A1", "A1"], (
            "a smaller group after a larger one does no harm"
        )
        assert set_of(AllReduceSpec(world_size=3, nbytes=1024)) == "A1", "nor does what maps nothing"
        assert set_of(mapped[3]) == "A1", "it was measured before"
        assert set_of(AllReduceSpec(world_size=3, nbytes=2048, execution="eager", in_place=False)) == "A2"
        assert set_of(mapped[2]) == "A2"
        assert pool.sets_made == 2


def test_a_set_measures_alone_when_no_other_is_alive(marked: Marked) -> None:
    with Pool(size=1, device="cpu", rounds=1, deadline_seconds=60, replicates=2) as pool:
        first, second = pool.live_sets()
        (sample,) = pool.measure_alone(SINGLE).samples
        assert sample.set == first.name == "A1"
        assert first.alive
        assert not second.alive
        assert [sample.set for sample in pool.measure(SINGLE).samples] == ["A1", "A3"]
