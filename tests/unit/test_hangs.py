"""The explanation of a hang, from what ranks print: what each does, and who is late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpperf.workers.hangs import COLLECTIVE, explained, seen_in, write_report

TORCH = "/x/lib/python3.11/site-packages/torch"
STACKS = f"""
Timeout (0:00:05)!Thread 0x00007f9c (most recent call first):
  File "/x/ddpperf/workers/worker.py", line 113 in _die_with_controller
  File "/x/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f9d (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 3913 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/a/models/slow.py", line 12 in forward
  File "/x/ddpperf/workers/start_rank.py", line 108 in <module>
"""
IDLE: dict[str, Any] = {}


def report(pending: Any, state: str = "sleeping", stacks: str = STACKS) -> str:
    """Return what a rank prints."""
    return f"state: {state}\nsome output\n{stacks}\n{COLLECTIVE}{json.dumps(pending)}\n"


def waiting(number: int, name: str = "all_reduce") -> dict[str, Any]:
    return {"name": name, "number": number}


@pytest.mark.parametrize(
    ("text", "doing"),
    [
        (
            report(waiting(7, "broadcast")),
            "sleeping, waits in broadcast number 7, at models/slow.py:12 in forward",
        ),
        (report(IDLE, "running"), "running, waits in no collective, at models/slow.py:12 in forward"),
        (report("nonsense"), "sleeping, waits in no collective, at models/slow.py:12 in forward"),
        (report(IDLE, "stopped", stacks=""), "stopped, and printed no stacks"),
    ],
)
def test_rank_is_described_by_its_state_collective_and_place(text: str, doing: str) -> None:
    assert seen_in("3", text).doing == doing


@pytest.mark.parametrize(
    ("pending", "line"),
    [
        ([waiting(7), IDLE], "rank 1 is late for all_reduce number 7"),
        ([waiting(7), waiting(5), waiting(7), IDLE], "ranks 1, 3 are late for all_reduce number 7"),
        ([IDLE, IDLE], "no rank waits in a collective"),
        (
            [waiting(7), waiting(7)],
            "no rank is late: all ranks wait in all_reduce number 7; check the network and the devices",
        ),
        (
            [waiting(7), waiting(7, "broadcast")],
            "the ranks wait in different collectives: all_reduce number 7, broadcast number 7",
        ),
    ],
)
def test_late_ranks_are_named(pending: list[dict[str, Any]], line: str) -> None:
    assert (
        explained([seen_in(str(rank), report(of_rank)) for rank, of_rank in enumerate(pending)])[-1] == line
    )


def test_ranks_that_do_the_same_share_a_line() -> None:
    ranks = [seen_in(str(rank), report(waiting(7) if rank < 7 else IDLE)) for rank in range(8)]
    first, second, _ = explained(ranks)
    assert first.startswith("ranks 0, 1, 2, 3, 4, 5, 6: sleeping, waits in all_reduce number 7, at")
    assert second.startswith("rank 7: sleeping, waits in no collective, at")


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = write_report(tmp_path / "file", "A1", {"0": "stacks"})
    assert f"cannot be written to {tmp_path / 'file'}" in line
