"""Ranks that answer with anything: a sentence names the rank, and other ranks are still heard."""

from __future__ import annotations

import base64
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.workers import channel
from ddpperf.workers.failures import Cause, SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.project import Marked

# Speaks the protocol of a rank without torch, up to its second command.
RANK = """#!{python} -S
import base64, os, socket, struct, time
connected = socket.socket(fileno=os.dup(0))
def read():
    length, = struct.unpack("!i", connected.recv(4, socket.MSG_WAITALL))
    return connected.recv(length, socket.MSG_WAITALL)
def write(content):
    connected.sendall(struct.pack("!i", len(content)) + content)
read()
write(b'{{"port": 1, "environment": {{"torch": "2.11"}}}}')
read()
try:
    answer = base64.b64decode(os.environ["ANSWER"])
    for byte in answer if "SLOWLY" in os.environ else ():
        connected.sendall(bytes([byte]))
        time.sleep(0.05)
    connected.sendall(answer)
    time.sleep(60)
except BrokenPipeError:
    pass
"""


def message(content: bytes) -> bytes:
    return struct.pack("!i", len(content)) + content


@pytest.fixture
def rank(marked: Marked, tmp_path: Path) -> Iterator[Path]:
    """The program of a rank, which must leave nothing behind."""
    program = tmp_path / "rank"
    program.write_text(RANK.format(python=sys.executable))
    program.chmod(0o755)
    yield program
    marked.assert_nothing_left()


def started(rank: Path, answer: bytes, size: int = 1, **variables: str) -> ProcessSet:
    environment = {"ANSWER": base64.b64encode(answer).decode(), **variables}
    side = Side(python=str(rank), environment=environment)
    live = ProcessSet("A1", side, SetOptions(size=size, device="cpu", rounds=1, deadline_seconds=20))
    live.spawn()
    live.wait_ready()
    return live


ANSWERS = {
    "no JSON": message(b"\x80\x04K\x01."),
    "a list": message(b"[]"),
    "nothing": message(b""),
    "NaN": message(b'{"seconds": NaN}'),
    "infinity": message(b'{"seconds": 1e999}'),
    "text": message(b'{"seconds": "\\u001b[31m\\ud800"}'),
    "deep": message(b'{"seconds": ' + b"[" * 60_000),
    "no seconds": message(b'{"unknown": 1}'),
    "error": message(b'{"error": "' + b"x" * 60_000 + b'"}'),
    "progress": message(b'{"progress": "half"}'),
    "long": struct.pack("!i", 400_000_000) + b" " * 50_000,
    "negative": struct.pack("!i", -1) + struct.pack("!Q", 2**40),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_malformed_answer_names_the_rank(rank: Path, answer: bytes) -> None:
    live = started(rank, answer)
    with pytest.raises(SetFailure, match=r"^rank 0 of set A1 sent an answer that pytest cannot") as caught:
        live.request("sample", iterations=1)
    (sentence,) = str(caught.value).splitlines()
    assert len(sentence) < 300
    assert sentence.isascii()
    assert not live.alive


def test_trickled_answer_is_a_hang(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MESSAGE_SECONDS", 0.3)
    live = started(rank, message(b" " * 1000), SLOWLY="1")
    began = time.monotonic()
    with pytest.raises(SetFailure, match=r"^rank 0 of set A1 sent only a part of a message within 0\.3 s"):
        live.request("sample", iterations=1)
    assert time.monotonic() - began < 5


def test_half_a_message_delays_no_report(rank: Path) -> None:
    """Rank 0 stops within its message; the death of rank 1 is reported at once."""
    live = started(rank, struct.pack("!i", 100) + b"{", size=2)
    began: list[float] = []

    def kill() -> None:
        began.append(time.monotonic())
        os.kill(live.pids[1], signal.SIGKILL)

    timer = threading.Timer(0.3, kill)
    timer.start()
    with pytest.raises(SetFailure, match=r"^rank 1 of set A1 was killed by SIGKILL") as caught:
        live.request("sample", iterations=1)
    assert time.monotonic() - began[0] < 2
    assert caught.value.failures[0].cause is Cause.DIED
    timer.join()
