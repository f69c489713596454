"""Real process sets on gloo: what they answer, how each fault of a rank is told, and that nothing of them is left."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.specs import AllReduceSpec, Fault, FaultCommand, FaultKind, TrainingSpec
from ddpperf.workers.failures import Cause, SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from tests.project import Marked, wait_until

SMALL = AllReduceSpec(world_size=2, nbytes=1024)


def with_fault(kind: FaultKind, command: FaultCommand = "sample") -> AllReduceSpec:
    return AllReduceSpec(world_size=2, nbytes=1024, fault=Fault(kind=kind, rank=1, command=command))


@pytest.fixture(scope="module")
def pool(marked: Marked) -> Iterator[Pool]:
    """One pool for all tests: a set that one of them broke is replaced for the next."""
    with Pool(size=2, device="cpu", rounds=3, deadline_seconds=60) as pool:
        yield pool
    marked.assert_nothing_left()


def failure_of(pool: Pool, spec: AllReduceSpec, deadline_seconds: float = 60) -> SetFailure:
    (live,) = pool.live_sets()
    live.options = dataclasses.replace(live.options, deadline_seconds=deadline_seconds)
    with pytest.raises(SetFailure, match=f"of set {live.name} ") as caught:
        pool.measure(spec)
    assert not live.alive
    return caught.value


def assert_next_set_measures(pool: Pool, failure: SetFailure) -> None:
    (sample,) = pool.measure(SMALL).samples
    assert f"of set {sample.set} " not in str(failure)


def test_raw_seconds_by_rank_and_round_come_back_with_what_measured_them(pool: Pool) -> None:
    measured = pool.measure(SMALL)
    (sample,) = measured.samples
    assert [len(ranks) for ranks in sample.seconds] == [2, 2, 2]
    assert sample.torch.split("+")[0] == pool.environment()["torch"].split("+")[0]  # type: ignore[attr-defined]
    assert sample.set.startswith(sample.side)


@pytest.mark.parametrize("own", [None, "glibc.malloc.check=0"])
def test_memory_comes_in_huge_pages_unless_the_user_says_otherwise(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    with Pool(size=1, device="cpu", rounds=1, deadline_seconds=60) as pool:
        (live,) = pool.live_sets()
        variables = Path("/proc", str(live.ranks[0].pid), "environ").read_text().split("\0")
    assert f"GLIBC_TUNABLES={own or 'glibc.malloc.hugetlb=1'}" in variables


def test_a_single_step_is_measured_on_every_rank_of_the_set_in_turn(pool: Pool) -> None:
    spec = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")
    (sample,) = pool.measure(spec).samples
    assert [len(ranks) for ranks in sample.seconds] == [2, 2, 2]


def test_a_leg_is_measured_once_by_the_same_sets(pool: Pool) -> None:
    assert pool.measure_once(SMALL) is pool.measure_once(SMALL)
    assert pool.measure(SMALL) is not pool.measure_once(SMALL)


def test_ddp_training_leaves_equal_parameters_and_finite_losses(pool: Pool) -> None:
    spec = TrainingSpec(world_size=2, per_rank_batch_size=2, strategy="ddp")
    (sample,) = pool.measure(spec).samples
    losses = sample.counters["loss_after_5_steps"]
    assert len(set(losses)) == 2, "each rank has a batch of its own"
    assert sample.kernels == "", "there is no other set to compare it with"


def test_two_sets_of_two_sides_interleave_their_rounds(marked: Marked, tmp_path: Path) -> None:
    sides = (Side(name="A"), Side(name="B", environment={"MARK_OF_B": "1"}))
    with Pool(size=2, device="cpu", rounds=3, deadline_seconds=60, sides=sides, log_folder=tmp_path) as pool:
        first, second = pool.measure(SMALL).samples
        assert [(first.set, first.side), (second.set, second.side)] == [("A1", "A"), ("B2", "B")]
        environments = [Path(f"/proc/{process}/environ").read_bytes() for process in marked.ranks()]
        assert sum(b"MARK_OF_B=1" in environment for environment in environments) == 2
    rounds = [
        (json.loads(line)["ended"], name)
        for name in ("A1", "B2")
        for line in (tmp_path / f"{name}-rank0.log")
        .read_text()
        .splitlines()[-3:]  # after those that calibrate
    ]
    assert [name for _, name in sorted(rounds)] == ["A1", "B2", "B2", "A1", "A1", "B2"]


def test_replicates_are_sets_of_their_own(marked: Marked) -> None:
    with Pool(size=1, device="cpu", rounds=2, deadline_seconds=60, replicates=2) as pool:
        measured = pool.measure(TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single"))
    assert [(sample.set, sample.side, len(sample.seconds)) for sample in measured.samples] == [
        ("A1", "A", 2),
        ("A2", "A", 2),
    ]
    assert set(measured.median_step_seconds()) == {"A1", "A2"}


def test_a_spec_larger_than_the_set_is_refused_in_one_sentence(pool: Pool) -> None:
    with pytest.raises(
        ValueError, match="world_size=3 needs as many ranks, the sets have 2; add it to --world-sizes"
    ):
        pool.measure(AllReduceSpec(world_size=3, nbytes=1024))


def test_a_rank_that_raises_is_named_with_its_traceback(pool: Pool) -> None:
    failure = failure_of(pool, with_fault("raise"))
    assert re.match(
        r"rank 1 of set A\d+ raised RuntimeError: injected into rank 1 at sample \(at sample\)\n",
        str(failure),
    )
    assert 'faults.py", line' in str(failure)
    assert failure.failures[0].cause is Cause.RAISED
    assert_next_set_measures(pool, failure)


def test_a_killed_rank_is_named_before_the_peer_that_lost_it(pool: Pool) -> None:
    failure = failure_of(pool, with_fault("kill"))
    assert re.match(r"rank 1 of set A\d+ was killed by SIGKILL \(at sample\)\n", str(failure))
    assert "injected into rank 1 at sample: kill" in str(failure), "the end of the rank's output is shown"
    assert_next_set_measures(pool, failure)


def test_a_rank_that_exits_early_is_named_with_its_status(pool: Pool) -> None:
    failure = failure_of(pool, with_fault("exit"))
    assert re.match(
        r"rank 1 of set A\d+ exited with status 0 before it answered \(at sample\)\n", str(failure)
    )
    assert_next_set_measures(pool, failure)


def test_a_hang_is_told_with_the_stacks_of_all_ranks(pool: Pool) -> None:
    failure = failure_of(pool, with_fault("hang"), deadline_seconds=10)
    assert "did not answer within 10 s (at sample)" in str(failure)
    stacks_of_0, stacks_of_1 = str(failure).split("stacks of rank 1:")
    assert "stacks of rank 0:" in stacks_of_0
    assert " in barrier" in stacks_of_0
    assert 'faults.py", line' in stacks_of_1
    assert_next_set_measures(pool, failure)


@pytest.mark.parametrize("command", ["open", "close"])
def test_a_fault_at_any_command_fails_that_command(pool: Pool, command: FaultCommand) -> None:
    failure = failure_of(pool, with_fault("raise", command))
    assert f"raised RuntimeError: injected into rank 1 at {command} (at {command})\n" in str(failure)


def test_an_interpreter_without_torch_is_told_with_what_it_printed(marked: Marked, tmp_path: Path) -> None:
    bare = Side(python=sys.executable, environment={"PYTHONPATH": str(tmp_path)})
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here')")
    pool = Pool(size=2, device="cpu", rounds=1, deadline_seconds=60, sides=(bare,))
    with pytest.raises(
        SetFailure, match=r"exited with status 1 before it answered \(at setup\)(.|\n)*no torch here"
    ):
        pool.measure(SMALL)
    pool.close()


def test_an_interpreter_that_is_not_there_is_told_and_leaves_nothing(marked: Marked) -> None:
    pool = Pool(size=2, device="cpu", rounds=1, deadline_seconds=60, sides=(Side(python="/no/such/python"),))
    with pytest.raises(SetFailure, match="could not be started: /no/such/python: No such file or directory"):
        pool.measure(SMALL)
    pool.close()


FORKS = """
import os, pathlib, threading, time
def fork_when_told(told=pathlib.Path(os.environ["FORK_WHEN"])):
    while not told.exists():
        time.sleep(0.02)
    if os.fork() == 0:
        time.sleep(60)
threading.Thread(target=fork_when_told, daemon=True).start()
"""


def test_a_death_is_seen_though_a_child_keeps_the_connection_open(marked: Marked, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FORKS)
    side = Side(environment={"PYTHONPATH": str(tmp_path), "FORK_WHEN": str(tmp_path / "now")})
    with Pool(size=2, device="cpu", rounds=1, deadline_seconds=10, sides=(side,)) as pool:
        (live,) = pool.live_sets()
        (tmp_path / "now").touch()
        time.sleep(0.5)
        os.kill(live.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(SetFailure, match="rank 1 of set A1 was killed by SIGKILL"):
            live.request("ping")


def test_a_rank_that_dies_idle_fails_the_test_that_used_its_set_or_none(pool: Pool) -> None:
    (live,) = pool.live_sets()
    os.kill(live.ranks[1].pid, signal.SIGKILL)
    wait_until(live.dead_ranks, 2, lambda: "the rank lives")
    with pytest.raises(SetFailure, match=r"rank 1 of set .* was killed by SIGKILL"):
        live.require_alive()
    (fresh,) = pool.live_sets()
    assert fresh.name != live.name
    assert pool.measure(SMALL).samples


def test_a_single_step_is_measured_without_a_process_group(pool: Pool) -> None:
    (live,) = pool.live_sets()
    pool.measure(SMALL)
    pool.measure(TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single"))
    with pytest.raises(SetFailure, match="Default process group has not been initialized"):
        live.request("leave")


def test_ranks_and_their_folder_end_with_a_killed_controller(marked: Marked) -> None:
    before = set(marked.folder.iterdir())
    controller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; from ddpperf.workers.pool import Pool\n"
            "pool = Pool(size=2, device='cpu', rounds=3, deadline_seconds=60); pool.live_sets(); print('ready', flush=True)\n"
            "time.sleep(60)",
        ],
        env=marked.environment,
        stdout=subprocess.PIPE,
    )
    assert controller.stdout is not None
    assert controller.stdout.readline() == b"ready\n"
    mine = Path(f"/proc/{controller.pid}/task/{controller.pid}/children").read_text().split()
    assert len(mine) == 2
    (folder,) = set(marked.folder.iterdir()) - before
    controller.kill()
    controller.wait()
    ranks = {
        int(rank) for rank in mine
    }  # what has ended and is only to be buried by init is no longer marked
    wait_until(
        lambda: not ranks & marked.processes().keys(), 2, lambda: f"left running: {marked.processes()}"
    )
    wait_until(lambda: not folder.exists(), 1, lambda: f"left: {list(folder.iterdir())}")
