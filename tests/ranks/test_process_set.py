"""Real process sets on gloo: their answers, the faults of ranks, and what is left of them."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpperf.instruments.kernels import other_kernels
from ddpperf.specs import AllReduceSpec, CopySpec, Spec, TrainingSpec, to_json
from ddpperf.workers.failures import Cause, SetFailure
from ddpperf.workers.interpreter import Side, rank_environment
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
from ddpperf.workers.rank_output import DRAIN_SECONDS
from tests import faults
from tests.faults import PURPOSE, failing
from tests.project import Marked, wait_until

SMALL = AllReduceSpec(world_size=2, nbytes=1024)
SINGLE = TrainingSpec(model="resnet10_cifar", world_size=1, per_rank_batch_size=2, strategy="single")
DDP = dataclasses.replace(SINGLE, world_size=2, strategy="ddp")


# --- what sets answer


@pytest.mark.parametrize("spec", [SMALL, SINGLE, DDP])
def test_raw_seconds_come_back_by_round_and_rank(two_ranks: Pool, spec: Spec) -> None:
    """Also of a single-device step, which each rank measures in turn."""
    (sample,) = two_ranks.measure(spec).samples
    assert [len(ranks) for ranks in sample.seconds] == [2, 2]
    assert sample.torch == two_ranks.environment()["torch"]
    assert sample.kernels == "", "there is no other set to compare it with"
    losses = sample.counters.get("loss_after_5_steps", (0.0,))
    assert len(set(losses)) == (2 if spec == DDP else 1), "each rank of a group has its own batch"


def test_all_ranks_of_a_group_report_kernels(two_ranks: Pool) -> None:
    (live,) = two_ranks.live_sets()
    if live.join(2):
        live.answers()
    live.request("open", spec=to_json(DDP))
    live.request("sample", iterations=1)
    finished = live.request("finish")
    assert all(answer["counters"]["communicator_seconds"] > 0 for answer in finished.values())
    answers = live.request("close", kernels=True)
    assert all(re.fullmatch("[0-9a-f]{12}", answer["kernels"]) for answer in answers.values())
    live.request("open", spec=to_json(SMALL))
    assert {answer["kernels"] for answer in live.request("close", kernels=True).values()} == {""}


def test_ranks_of_one_node_meet_in_a_private_folder(two_ranks: Pool) -> None:
    two_ranks.measure(SMALL)
    (live,) = two_ranks.live_sets()
    assert live._network == {"port": None}, "a TCP store's keys can be read and written by all users"
    assert stat.S_IMODE(live._folder.path.stat().st_mode) == 0o700
    for pid in live.pids.values():
        variables = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"\0OMP_NUM_THREADS=1\0" in variables
        assert b"\0GLOO_SOCKET_IFNAME=lo\0" in variables


@pytest.mark.slow
def test_default_socket_timeout_does_not_reach_ranks() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.5)
    try:
        with Pool(SetOptions(size=1, device="cpu", rounds=1, deadline_seconds=60)) as pool:
            pool.live_sets()
            time.sleep(1)  # a rank that waits for messages only so long ends here
            assert pool.measure(CopySpec(world_size=1, nbytes=1024)).samples
    finally:
        socket.setdefaulttimeout(before)


@pytest.mark.parametrize(
    ("name", "on_cpu"), [("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"), ("TORCH_FR_BUFFER_SIZE", "256")]
)
def test_ranks_on_a_cpu_have_variables_unless_set_otherwise(
    name: str, on_cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert rank_environment("cpu")[name] == on_cpu
    assert name not in rank_environment("cuda")
    monkeypatch.setenv(name, "another")
    assert rank_environment("cpu")[name] == "another"


# --- faults


def failure_of(pool: Pool, kind: str) -> str:
    """Measure a step that fails; the set must be dead, and the next one must measure."""
    (live,) = pool.live_sets()
    pool.measure(SMALL)
    with pytest.raises(SetFailure, match=f"of set {live.name} ") as caught:
        pool.measure(failing(kind))
    assert not live.alive
    (sample,) = pool.measure(SMALL).samples
    assert sample.set != live.name
    assert caught.value.failures[0].rank == 1 or caught.value.failures[0].cause is Cause.HUNG
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "what", "more"),
    [
        ("raises", rf"raised RuntimeError: {PURPOSE} \(at sample\)", "in raise_error"),
        ("kill", r"was killed by SIGKILL \(at sample\)", PURPOSE),
        pytest.param("leave", r"exited with status 0 \(at sample\)", PURPOSE, marks=pytest.mark.slow),
    ],
)
def test_failed_rank_is_named_first_with_its_cause(two_ranks: Pool, kind: str, what: str, more: str) -> None:
    """A traceback follows, or the end of the rank's output."""
    failure = failure_of(two_ranks, kind)
    assert re.match(rf"rank 1 of set A\d+ {what}\n", failure)
    assert more in failure


HANG_SECONDS = 3


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool whose ranks soon count as hung."""
    hangs = tmp_path_factory.mktemp("hangs")
    options = SetOptions(size=2, device="cpu", rounds=2, deadline_seconds=HANG_SECONDS, hang_folder=hangs)
    with Pool(options, sides=(Side(environment=faults.ALLOWED),)) as pool:
        yield pool


def test_hang_is_explained_and_its_stacks_are_kept(impatient: Pool) -> None:
    failure = failure_of(impatient, "hang")
    first, of_0, of_1, late, stacks, hint = failure.splitlines()
    assert f"did not answer within {HANG_SECONDS} s (at sample)" in first
    place = r"at tests/faults\.py:\d+ in"
    assert re.fullmatch(rf"rank 0: (sleeping|running), waits in barrier number \d+, {place} step", of_0)
    assert re.fullmatch(rf"rank 1: sleeping, waits in no collective, {place} sleep_for_ever", of_1)
    assert re.fullmatch(r"rank 1 is late for barrier number \d+", late)
    assert "pass a larger --deadline" in hint
    kept = Path(stacks.removeprefix("the stacks of all ranks are in ")).read_text()
    stacks_of_0, stacks_of_1 = kept.split("\nrank 1: ")
    assert " in barrier" in stacks_of_0
    assert '"name": "barrier"' in stacks_of_0
    assert "in sleep_for_ever" in stacks_of_1


def test_stopped_rank_is_named_late_within_two_seconds(impatient: Pool) -> None:
    (live,) = impatient.live_sets()
    impatient.measure(SMALL)
    os.kill(live.pids[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(SetFailure) as caught:
        impatient.measure(SMALL)
    assert time.monotonic() - began < HANG_SECONDS + 2
    assert "\nrank 1: stopped, and printed no stacks\n" in str(caught.value)
    assert "\nrank 1 is late for " in str(caught.value)


@pytest.mark.slow
def test_rank_that_dies_idle_fails_the_set_at_once(two_ranks: Pool) -> None:
    (live,) = two_ranks.live_sets()
    os.kill(live.pids[1], signal.SIGKILL)
    wait_until(live.dead_ranks, 2, lambda: "the rank lives")
    with pytest.raises(SetFailure, match=r"rank 1 of set .* was killed by SIGKILL"):
        live.require_alive()
    (fresh,) = two_ranks.live_sets()
    assert fresh.name != live.name


@pytest.mark.slow
def test_single_step_needs_no_process_group(two_ranks: Pool) -> None:
    two_ranks.measure(SMALL)
    two_ranks.measure(SINGLE)
    (live,) = two_ranks.live_sets()
    assert live.join(2), "the group of the all-reduce has ended"
    live.answers()  # no rank can form a second group


# --- sets that do not start, and what is left of a set


@pytest.fixture
def one(marked: Marked) -> Iterator[Side]:
    """A side whose test must leave nothing behind."""
    yield Side()
    marked.assert_nothing_left()


def test_two_sides_run_their_own_code(marked: Marked, tmp_path: Path) -> None:
    """The candidate computes convolutions without oneDNN, by a sitecustomize.py on its path."""
    (tmp_path / "sitecustomize.py").write_text("import torch; torch.backends.mkldnn.set_flags(False)")
    sides = Side(name="A"), Side(name="B", environment={"PYTHONPATH": str(tmp_path)})
    with Pool(SetOptions(size=1, device="cpu", rounds=3, deadline_seconds=60), sides=sides) as pool:
        measured, again = pool.measure(SINGLE), pool.measure(SINGLE)
        other = pool.measure(dataclasses.replace(SINGLE, input="device")).samples
    marked.assert_nothing_left()
    first, second = measured.samples
    assert [sample.kernels for sample in again.samples] == [first.kernels, second.kernels]
    assert len({first.kernels, second.kernels, other[0].kernels}) == 3
    assert other_kernels(measured) == [], "sides may differ"


PRINTS_MUCH = r"""
for number in range(20):
    print("x" * 900_000)
print("::error::\x1b[31mred")
raise ModuleNotFoundError("no torch here")
"""


def test_flood_of_a_rank_makes_a_short_harmless_message(one: Side, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(PRINTS_MUCH)
    side = dataclasses.replace(one, environment={"PYTHONPATH": str(tmp_path)})
    words = r"exited with status 1 \(at setup\)(.|\n)*\n: :error::\?\[31mred\n(.|\n)*no torch"
    options = SetOptions(size=1, device="cpu", rounds=1, deadline_seconds=60)
    with Pool(options, sides=(side,)) as pool, pytest.raises(SetFailure, match=words) as caught:
        pool.live_sets()
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("python", "/no/such/python", "No such file or directory"),
        ("root", Path("/no/such/tree"), "no such source tree"),  # the installed code would run
    ],
)
def test_missing_interpreter_or_tree_is_named(one: Side, field: str, value: Any, why: str) -> None:
    missing = dataclasses.replace(one, **{field: value})
    with (
        Pool(SetOptions(size=2, device="cpu", rounds=1, deadline_seconds=60), sides=(missing,)) as pool,
        pytest.raises(SetFailure, match=f"could not be started: {value}: {why}"),
    ):
        pool.measure(SMALL)


FORKS = """
import os, pathlib, threading, time
def fork_when_told(told=pathlib.Path(os.environ["FORK_WHEN"])):
    while not told.exists():
        time.sleep(0.02)
    if os.fork() == 0:
        time.sleep(60)
    told.with_name("forked").touch()
threading.Thread(target=fork_when_told, daemon=True).start()
"""


@pytest.mark.slow
def test_death_is_seen_though_a_child_keeps_the_connection(one: Side, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FORKS)
    variables = {"PYTHONPATH": str(tmp_path), "FORK_WHEN": str(tmp_path / "now")}
    side = dataclasses.replace(one, environment=variables)
    with Pool(SetOptions(size=1, device="cpu", rounds=1, deadline_seconds=10), sides=(side,)) as pool:
        (live,) = pool.live_sets()
        (tmp_path / "now").touch()
        wait_until((tmp_path / "forked").exists, 10, lambda: "the rank did not fork")
        os.kill(live.pids[0], signal.SIGKILL)
        wait_until(live.dead_ranks, 5, lambda: "the rank lives")
        began = time.monotonic()
        live.ranks[0].death()
        assert time.monotonic() - began < DRAIN_SECONDS, "it waited for the child to close its output"
        with pytest.raises(SetFailure, match="rank 0 of set A1 was killed by SIGKILL"):
            live.request("leave")


CONTROLLER = """
import time
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import SetOptions
pool = Pool(SetOptions(size=1, device="cpu", rounds=3, deadline_seconds=60))
pool.live_sets()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_and_folder_end_with_a_killed_controller(marked: Marked) -> None:
    before = set(marked.folder.iterdir())
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER], env=marked.environment, stdout=subprocess.PIPE
    )
    assert controller.stdout is not None
    assert controller.stdout.readline() == b"ready\n"
    (rank,) = Path(f"/proc/{controller.pid}/task/{controller.pid}/children").read_text().split()
    (folder,) = set(marked.folder.iterdir()) - before
    controller.kill()
    controller.wait()
    # A rank that has ended, and that init has yet to reap, is no longer marked.
    wait_until(lambda: int(rank) not in marked.processes(), 2, lambda: f"left running: {marked.processes()}")
    wait_until(lambda: not folder.exists(), 1, lambda: f"left: {list(folder.iterdir())}")
