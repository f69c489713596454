"""The channel between a controller and a rank: messages of JSON only."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ddpperf.workers.channel import limit_pauses, receive, send


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


def test_pause_within_a_message_ends_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        limit_pauses(ours, 0.1)
        theirs.sendall(b"\0\0\0\x40half a message")
        with Connection(ours.detach()) as connection, pytest.raises(BlockingIOError, match="unavailable"):
            receive(connection)


def test_full_buffer_ends_a_message() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        limit_pauses(ours, 0.1)
        with Connection(ours.detach()) as connection, pytest.raises(BlockingIOError, match="unavailable"):
            send(connection, {"text": "x" * 2**24})


def test_pickle_is_never_opened(ends: tuple[Connection, Connection], tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "exploded",)

    ours, theirs = ends
    theirs.send(Bomb())
    with pytest.raises(ValueError, match="can't decode byte"):
        receive(ours)
    assert not (tmp_path / "exploded").exists()
