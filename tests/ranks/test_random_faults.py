"""The tool for faults at random moments, on real ranks: what it reports, and that it can fail."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import left_behind, of_ranks
from tests.faults.left_behind import LeftBehind
from tests.faults.of_ranks import RankFault, RankFaults
from tests.project import Marked

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankFaults]:
    made = RankFaults()
    yield made
    made.close()


@slow
def test_handled_fault_has_no_problems(ranks: RankFaults) -> None:
    fault = RankFault(name="exits", word="exit", cause=of_ranks.EXITED, moments=("round",))
    outcome = ranks.fault(fault, 0, random.Random(1))
    assert outcome.problems() == []
    assert outcome.moment == "round"
    assert outcome.seconds is not None
    assert 0 < outcome.seconds < of_ranks.AT_ONCE


@slow
def test_fault_with_another_cause_fails(ranks: RankFaults) -> None:
    fault = RankFault(name="other", signal=signal.SIGKILL, cause="was killed by SIGSEGV", moments=("round",))
    (problem,) = ranks.fault(fault, 0, random.Random(1)).problems()
    assert problem.startswith("the report does not name the cause")
    assert "was killed by SIGKILL" in problem


@slow
def test_fault_that_nobody_reports_fails(ranks: RankFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_ranks, "STUCK_SECONDS", 5.0)
    fault = RankFault(name="none", signal=signal.SIGCONT, cause="was killed", moments=("idle",))
    problems = ranks.fault(fault, 0, random.Random(1)).problems()
    assert "the report does not name the cause: ''" in problems


@slow
def test_slow_rank_that_is_reported_fails(ranks: RankFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_ranks, "LONGEST_PAUSE", 1000.0)
    monkeypatch.setattr(of_ranks, "DEADLINE_SECONDS", 1.0)
    fault = RankFault(name="slow", word="slow", moments=("round",))
    (problem,) = ranks.fault(fault, 0, random.Random(1)).problems()
    assert "did not answer within 1 s" in problem


def test_what_is_left_is_found_once(marked: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, results = tmp_path / "shm", tmp_path / "results"
    memory.mkdir()
    results.mkdir()
    (memory / "of another").touch()
    monkeypatch.setattr(left_behind, "SHARED_MEMORY", memory)
    monkeypatch.setattr(left_behind, "END_SECONDS", 0.1)
    left = LeftBehind(marked, [results])
    assert left.found() == ()
    files = [marked.folder / "ddpperf-x", memory / "sem.x", results / "new.tmp"]
    files[0].mkdir()
    for file in files[1:]:
        file.touch()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))):
        process = subprocess.Popen([sys.executable, "-c", "input()"], env=marked.environment, stdin=-1)
        found = left.found()
        assert process.wait(10) == -9, "it is killed"
    assert found[0].startswith(f"process {sys.executable} -c input()"[:80])
    assert sorted(found[1:4]) == sorted(map(str, files))
    assert found[4:] == ("sockets of this process: 1",)
    assert left.found() == ()
    files[0].rmdir()
