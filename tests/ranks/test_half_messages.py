"""Ranks that send wrong or half messages: a sentence names the rank, and other ranks are still heard."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.project import Marked

# Speaks the protocol of a rank without torch, up to its second command.
RANK = """#!{python} -S
import os, socket, struct, time
connected = socket.socket(fileno=os.dup(0))
def read():
    length, = struct.unpack("!i", connected.recv(4, socket.MSG_WAITALL))
    return connected.recv(length, socket.MSG_WAITALL)
read()
ready = b'{{"port": 1, "environment": {{"torch": "2.11"}}}}'
connected.sendall(struct.pack("!i", len(ready)) + ready)
read()
connected.sendall(bytes.fromhex(os.environ["ANSWER"]))
time.sleep(60)
"""


@pytest.fixture
def program(marked: Marked, tmp_path: Path) -> Iterator[Path]:
    program = tmp_path / "rank"
    program.write_text(RANK.format(python=sys.executable))
    program.chmod(0o755)
    yield program
    marked.assert_nothing_left()


def started(program: Path, answer: bytes, size: int = 1) -> ProcessSet:
    side = Side(python=str(program), environment={"ANSWER": answer.hex()})
    live = ProcessSet("A1", side, SetOptions(size=size, device="cpu", rounds=1, deadline_seconds=20))
    live.spawn()
    live.wait_ready()
    return live


@pytest.mark.parametrize("content", [b"\x80\x04K\x01.", json.dumps({"unknown": 1}).encode()])
def test_wrong_answer_names_the_rank(program: Path, content: bytes) -> None:
    live = started(program, struct.pack("!i", len(content)) + content)
    with pytest.raises(SetFailure, match=r"^rank 0 of set A1 sent an answer that pytest cannot read"):
        live.request("sample", iterations=1)
    assert not live.alive


def test_half_a_message_delays_no_report(program: Path) -> None:
    """Rank 0 stops within its message; the death of rank 1 is reported at once."""
    live = started(program, struct.pack("!i", 100) + b"{", size=2)
    began: list[float] = []

    def kill() -> None:
        began.append(time.monotonic())
        os.kill(live.pids[1], signal.SIGKILL)

    timer = threading.Timer(0.3, kill)
    timer.start()
    with pytest.raises(SetFailure, match=r"^rank 1 of set A1 was killed by SIGKILL"):
        live.request("sample", iterations=1)
    assert time.monotonic() - began[0] < 2
    timer.join()
