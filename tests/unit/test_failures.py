"""The error of a process set: which rank it names first, and what the ranks of a hang do and print."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpperf.errors import CannotTrain
from ddpperf.workers import worker
from ddpperf.workers.failures import COLLECTIVE, Cause, RankFailure, Report, SetFailure, explain_hang
from ddpperf.workers.worker import Watchdog, describe

DIED = RankFailure(rank=3, cause=Cause.DIED, what="was killed by SIGKILL", detail="last words\n")
RAISED = RankFailure(rank=2, cause=Cause.RAISED, what="raised ValueError: no", detail="Traceback 2")
DISTRIBUTED = RankFailure(
    rank=1, cause=Cause.RAISED_DISTRIBUTED, what="raised DistBackendError", detail="Traceback 1"
)
HUNG = RankFailure(rank=0, cause=Cause.HUNG, what="gave no answer in 20 s", detail="stacks 0")


@pytest.mark.parametrize("order", list(itertools.permutations([DIED, RAISED, DISTRIBUTED, HUNG])))
def test_likeliest_cause_comes_first_in_any_order(order: tuple[RankFailure, ...]) -> None:
    assert str(SetFailure("A1", "at sample", order)).splitlines() == [
        "rank 3 of set A1 was killed by SIGKILL (at sample)",
        "last words",
        "after it, rank 2 raised ValueError: no",
        "after it, rank 1 raised DistBackendError",
        "after it, rank 0 gave no answer in 20 s",
    ]


def test_first_noticed_is_named_of_equal_causes() -> None:
    """Not the lowest rank: torchrun kills rank 0 when rank 1 has died."""
    peers = [RankFailure(rank=rank, cause=Cause.DIED, what="ended", detail="") for rank in (5, 1, 3)]
    failure = SetFailure("A1", "at sample", peers)
    assert [one.rank for one in failure.failures] == [5, 1, 3]
    assert str(failure).startswith("rank 5 of set A1 ended (at sample)\n")


def test_hung_ranks_are_named_together_with_stacks() -> None:
    hung = [RankFailure(rank=rank, cause=Cause.HUNG, what="hung", detail=f"stacks {rank}") for rank in (0, 1)]
    lines = ["ranks 0, 1 of set A1 hung (at sample)", "stacks 0", "stacks 1"]
    assert str(SetFailure("A1", "at sample", hung)).splitlines() == lines


@pytest.mark.parametrize(
    ("doing", "failure", "slow"),
    [("at setup", HUNG, True), ("at open", HUNG, False), ("at setup", DIED, False)],
)
def test_slow_start_is_a_hang_before_any_measurement(doing: str, failure: RankFailure, slow: bool) -> None:
    assert SetFailure("B1", doing, [failure]).is_slow_start == slow


def captured(error: Exception) -> CannotTrain:
    """Return the refusal of a graph capture that this error stopped."""
    refusal = CannotTrain("execution graph cannot capture this step")
    refusal.__cause__ = error
    return refusal


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (torch.OutOfMemoryError("no room"), True),
        (captured(RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")), True),
        (OverflowError("int too large"), True),
        (CannotTrain("a mistake"), False),
        (captured(ValueError("a mistake")), False),
        (NotImplementedError("yet"), False),
        (FloatingPointError("the loss is nan"), False),
    ],
)
def test_limits_are_told_from_mistakes(error: Exception, limit: bool) -> None:
    assert describe(error)["limit"] is limit


# --- hangs

TORCH = "/x/lib/python3.11/site-packages/torch"
STACKS = f"""
Timeout (0:00:05)!Thread 0x00007f9c (most recent call first):
  File "/x/ddpperf/workers/worker.py", line 113 in _die_with_controller
  File "/x/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f9d (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3913 in all_reduce
  File "/home/a/models/slow.py", line 12 in forward
  File "/x/ddpperf/workers/rank_entry.py", line 108 in <module>
"""
AT = "at models/slow.py:12 in forward"


def waiting(number: int, name: str = "all_reduce") -> dict[str, Any]:
    return {"name": name, "number": number}


def explained(pending: list[Any], folder: Path) -> list[str]:
    """Explain a hang of ranks that wait in these collectives; None stands for a rank without stacks."""
    printed = [f"output\n{STACKS}\n{COLLECTIVE}{json.dumps(of_rank)}\n" for of_rank in pending]
    reports = [
        Report(rank=str(rank), state="sleeping", printed="output" if pending[rank] is None else text)
        for rank, text in enumerate(printed)
    ]
    return explain_hang(reports, folder, "A1").splitlines()


def test_hang_says_what_ranks_do(tmp_path: Path) -> None:
    """Of the stacks, the user's innermost frame is named."""
    pending = [waiting(7), waiting(5), waiting(7), {}, None]
    of_0_and_2, of_1, of_3, of_4, _, file, _ = explained(pending, tmp_path)
    assert of_0_and_2 == f"ranks 0, 2: sleeping, waits in all_reduce number 7, {AT}"
    assert of_1 == f"rank 1: sleeping, waits in all_reduce number 5, {AT}"
    assert of_3 == f"rank 3: sleeping, waits in no collective, {AT}"
    assert of_4 == "rank 4: sleeping, and printed no stacks"
    assert STACKS in Path(file.removeprefix("the stacks of all ranks are in ")).read_text()


@pytest.mark.parametrize(
    ("pending", "late"),
    [
        ([waiting(7), waiting(5), waiting(7), {}], "ranks 1, 3 are late for all_reduce number 7"),
        ([waiting(7), None], "rank 1 is late for all_reduce number 7"),
        (["nonsense", {}], "no rank waits in a collective"),
        (
            [waiting(7)] * 2,
            "no rank is late: all ranks wait in all_reduce number 7; check the network and the devices",
        ),
        (
            [waiting(7), waiting(7, "broadcast")],
            "the ranks wait in different collectives: all_reduce number 7, broadcast number 7",
        ),
    ],
)
def test_hang_says_which_ranks_are_late(pending: list[Any], late: str, tmp_path: Path) -> None:
    assert explained(pending, tmp_path)[-3] == late


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = explain_hang([Report(rank="0", state="sleeping", printed="")], tmp_path / "file", "A1")
    assert f"cannot be written to {tmp_path / 'file'}" in found


# --- what a rank prints


def test_late_command_prints_stacks_and_collective(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version's record of torch may lack a field; the last line comes all the same."""

    def other_form() -> dict[str, object]:
        raise KeyError("pg_id")

    monkeypatch.setattr(worker, "pending_collective", other_form)
    watchdog = Watchdog(0.1)
    watchdog.begin()
    time.sleep(0.5)
    watchdog.end()
    watchdog.begin()
    watchdog.end()  # in time: prints nothing more
    time.sleep(0.3)
    printed = capfd.readouterr().err
    assert printed.count("Timeout (0:00:00") == 1
    assert "in test_late_command_prints_stacks_and_collective" in printed
    assert printed.endswith(f"\n{COLLECTIVE}{{}}\n")
