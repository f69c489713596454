"""The channel between a controller and a rank: messages of JSON only."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ddpperf.workers import channel
from ddpperf.workers.channel import (
    Receiver,
    SlowMessage,
    limit_pauses,
    problem_of,
    receive,
    send,
)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    with ours, theirs:
        yield ours, theirs


def test_messages_pass_both_ways(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    send(ours, {"command": "sample", "ranks": [0, 1], "seconds": 0.1})
    send(ours, {"command": "close", "text": "ü" * 1000})
    assert receive(theirs) == {"command": "sample", "ranks": [0, 1], "seconds": 0.1}
    assert receive(theirs) == {"command": "close", "text": "ü" * 1000}
    send(theirs, {"rank": None})
    assert receive(ours) == {"rank": None}


def test_closed_connection_is_an_end_of_file(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(EOFError, match=r"^$"):
        receive(ours)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_not_sent(ends: tuple[Connection, Connection], seconds: float) -> None:
    ours, theirs = ends
    with pytest.raises(ValueError, match="not JSON compliant"):
        send(theirs, {"seconds": seconds})
    assert not ours.poll()


def test_pause_within_a_message_ends_it(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(channel, "MESSAGE_SECONDS", 0.1)
    os.write(theirs.fileno(), b"\0\0\0\x40half a message")
    with pytest.raises(SlowMessage, match=r"^sent only a part of a message within 0\.1 s$"):
        receive(ours)


def test_trickle_has_the_time_of_one_message(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte at a time, with pauses that are shorter than the limit."""
    ours, theirs = ends
    monkeypatch.setattr(channel, "MESSAGE_SECONDS", 0.3)
    is_over = threading.Event()

    def trickle() -> None:
        for _ in range(200):
            os.write(theirs.fileno(), b"\0")
            if is_over.wait(0.1):
                return

    os.write(theirs.fileno(), b"\0\0\1\0")
    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(SlowMessage, match="only a part"):
        receive(ours)
    is_over.set()
    thread.join()
    assert time.monotonic() - began < 5


def test_messages_of_one_write_are_read_in_turn(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    receiver = Receiver(ours)
    assert receiver.read() is None
    os.write(theirs.fileno(), 2 * b'\0\0\0\x07{"a":1}' + b"\0\0\0\x07{")
    assert [receiver.read(), receiver.read(), receiver.read()] == [{"a": 1}, {"a": 1}, None]
    os.write(theirs.fileno(), b'"b":2}')
    assert receiver.read() == {"b": 2}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "must be JSON"),
        (b"\xff\xfe\xfd", "must be JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b'{"seconds": NaN}', "NaN is no number"),
        (b'{"seconds": -Infinity}', "-Infinity is no number"),
    ],
)
def test_what_is_no_message_is_a_value_error(
    ends: tuple[Connection, Connection], content: bytes, why: str
) -> None:
    ours, theirs = ends
    theirs.send_bytes(content)
    with pytest.raises(ValueError, match=why):
        receive(ours)


def test_silence_has_a_limit(ends: tuple[Connection, Connection]) -> None:
    with pytest.raises(SlowMessage, match=r"^sent no message within 0\.1 s$"):
        receive(ends[0], 0.1)


def test_full_buffer_ends_a_message() -> None:
    ours, theirs = socket.socketpair()
    with theirs, Connection(ours.detach()) as connection:
        limit_pauses(connection, 0.1)
        with pytest.raises(BlockingIOError, match="unavailable"):
            send(connection, {"text": "x" * 2**24})


def test_pickle_is_never_opened(ends: tuple[Connection, Connection], tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "exploded",)

    ours, theirs = ends
    theirs.send(Bomb())
    with pytest.raises(ValueError, match="must be JSON"):
        receive(ours)
    assert not (tmp_path / "exploded").exists()


# --- answers of ranks

ERROR = {"summary": "ValueError: no", "traceback": "", "distributed": False}


@pytest.mark.parametrize(
    ("command", "answer", "problem"),
    [
        ("ping", {}, ""),
        ("setup", {"environment": {"torch": "2.11"}, "of a newer version": 1}, ""),
        ("sample", {"seconds": 0.5}, ""),
        ("sample", {"progress": 0.5}, ""),
        ("sample", {"error": ERROR | {"limit": True}}, ""),
        ("sample", {"unknown": 1}, "seconds is missing"),
        ("sample", {"seconds": "\x1b[31m"}, "seconds is '\\x1b[31m'"),
        ("sample", {"progress": []}, "progress is []"),
        ("sample", {"error": {}}, "summary is missing"),
        ("open", {"max_iterations": None}, "max_iterations is None"),
        ("finish", {}, "counters is missing"),
        ("close", {"counters": []}, "counters is []"),
    ],
)
def test_problem_of_an_answer_is_named(command: str, answer: dict[str, Any], problem: str) -> None:
    assert problem_of(command, answer) == problem
