"""The ranks of a node's agent: what is left of them, and the lengths of messages about them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpperf.machine.network import find_interface
from ddpperf.node.agent_ranks import AgentRanks
from ddpperf.node.joining import Joining
from ddpperf.workers import channel
from tests.project import wait_until

KEY = bytes(32)


class Ranks:
    """An agent's ranks, whose interpreter is a shell script."""

    def __init__(self, port: int, folder: Path) -> None:
        self.made = AgentRanks(("127.0.0.1", port), KEY, "lo")
        self.python = folder / "python"

    def start(self, script: str) -> Any:
        self.python.write_text(f"#!/bin/sh\n{script}\n")
        self.python.chmod(0o700)
        side: dict[str, Any] = {"name": "A", "python": str(self.python), "root": None, "environment": {}}
        where = {"set": "A1", "rank": 1, "node_rank": 0, "device": "cpu", "log_folder": None}
        return self.made.start("token", 1, {**where, "side": side})


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    joining = Joining(find_interface("lo"), 0, KEY, count=2, expected={}, welcome={}, digest="")
    made = Ranks(joining.port, tmp_path)
    yield made
    made.made.end_all()
    joining.close()


def left() -> tuple[list[psutil.Process], int]:
    """Return this process's children, and its number of open descriptors."""
    return psutil.Process().children(), psutil.Process().num_fds()


def test_rank_that_cannot_be_watched_is_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(process: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", missing)
    before = left()
    answer = ranks.start("sleep 60")
    assert "could not be started: [Errno 38]" in answer["what"]
    wait_until(lambda: left() == before, 5, lambda: f"before {before}, now {left()}")
    assert ranks.made.exits() == {}


def test_end_of_a_flooding_rank_fits_a_message(ranks: Ranks) -> None:
    assert ranks.start("head -c 1500000 /dev/zero; exit 3") is None
    (running,) = ranks.made.exits().values()
    running.process.wait(20.0)
    ended = ranks.made.end_of(running)
    assert ended["what"] == "exited with status 3 before it answered"
    assert len(json.dumps(ended)) < channel.MOST_BYTES / 10


def test_stacks_of_a_flooding_rank_fit_a_message(ranks: Ranks) -> None:
    flood = "head -c 1500000 /dev/zero; echo; echo ddpperf collectives: {}"
    assert ranks.start(f"trap '{flood}' USR1\necho ready\nwhile :; do sleep 0.05; done") is None
    (running,) = ranks.made.exits().values()
    wait_until(lambda: running.process.output.printed, 10, lambda: "it is not ready")
    stacks = ranks.made.stacks("token")
    assert stacks.startswith("state: ")
    assert "letters here)" in stacks
    assert len(json.dumps({"rank": "token", "stacks": stacks})) < channel.MOST_BYTES
