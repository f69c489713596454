"""The explanation of a hang, from what ranks print: who is late, in few lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpperf.workers.hangs import COLLECTIVES, MOST_LINES, Seen, explained, seen_in, write_report
from tests.generated import BOUNDED

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


def report(pending: Any, state: str = "sleeping", stacks: str = STACKS) -> str:
    """Return what a rank prints; pending=None stands for a torch without a record."""
    line = json.dumps({} if pending is None else {"pending": pending})
    return f"state: {state}\nsome output\n{stacks}\n{COLLECTIVES}{line}\n"


def waiting(rank: int, number: int | None = 7, collective: str = "all_reduce", **fields: Any) -> Seen:
    return Seen(name=str(rank), state="sleeping", collective=collective, number=number, **fields)


def idle(rank: int, **fields: Any) -> Seen:
    return Seen(name=str(rank), state="running", **fields)


@pytest.mark.parametrize(
    ("text", "doing"),
    [
        (report({"name": "broadcast", "number": 7}), "sleeping, waits in broadcast number 7"),
        (report({}), "sleeping, waits in no collective"),
        (report(None), "sleeping, waits in all_reduce"),
        (report("nonsense"), "sleeping, waits in all_reduce"),
        (report({"name": 5, "number": "x" * 10}), "sleeping, waits in 5"),
    ],
)
def test_collective_is_from_the_record_or_stacks(text: str, doing: str) -> None:
    assert seen_in("3", text).doing == f"{doing}, at models/slow.py:12 in forward"


@pytest.mark.parametrize(
    ("text", "doing"),
    [
        (report({}, "stopped", stacks=""), "stopped, and printed no stacks"),
        ("", "unknown, and printed no stacks"),
    ],
)
def test_rank_without_stacks_has_its_state(text: str, doing: str) -> None:
    assert seen_in("3", text).doing == doing


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ([waiting(0), idle(1)], "rank 1 is late: rank 0 waits for it in all_reduce number 7"),
        (
            [waiting(0), waiting(1, 5), waiting(2), idle(3, has_answered=False)],
            "ranks 1, 3 are late: ranks 0, 2 wait for them in all_reduce number 7",
        ),
        ([idle(0), idle(1)], "no rank waits in a collective"),
        (
            [waiting(0), waiting(1)],
            "no rank is late: all ranks wait in all_reduce number 7; check the network and the devices",
        ),
        (
            [waiting(0, None), waiting(1, None, "broadcast")],
            "the ranks wait in different collectives: all_reduce, broadcast",
        ),
    ],
)
def test_late_ranks_are_named(ranks: list[Seen], line: str) -> None:
    assert explained(ranks)[-1] == line


def test_ranks_that_do_the_same_share_a_line() -> None:
    ranks = [*(waiting(rank) for rank in range(7)), idle(7)]
    assert explained(ranks)[:-1] == [
        "ranks 0, 1, 2, 3, 4, 5, 6: sleeping, waits in all_reduce number 7",
        "rank 7: running, waits in no collective",
    ]


def test_many_ranks_have_few_lines() -> None:
    lines = explained([waiting(rank, rank) for rank in range(64)])
    assert len(lines) == MOST_LINES + 1
    assert lines[-2] == "and 57 more groups of ranks"


@BOUNDED
@given(st.text(max_size=80), st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists))
def test_any_report_is_read(text: str, pending: Any) -> None:
    line = json.dumps({"pending": pending})
    for whole in (text, f"{STACKS}{text}", f"{STACKS}\n{COLLECTIVES}{line}\n{text}", f"{COLLECTIVES}{text}"):
        assert len(explained([seen_in("0", whole), idle(1)])) <= 3


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = write_report(tmp_path / "file", "A1", {"0": "stacks"})
    assert "cannot be written" in line
    assert str(tmp_path / "file") in line
