"""The channel between a controller and a rank: messages of JSON only."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ddpperf.workers import channel
from ddpperf.workers.channel import SlowMessage, limit_pauses, receive, send


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
    monkeypatch.setattr(channel, "PAUSE_SECONDS", 0.1)
    limit_pauses(ours, 0.1)
    os.write(theirs.fileno(), b"\0\0\0\x40half a message")
    with pytest.raises(SlowMessage, match=r"^sent only a part of a message within 0\.1 s$"):
        receive(ours)


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
