"""The channel between a controller and a rank: messages of JSON only."""

from __future__ import annotations

import math
import os
import pickle
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from ddpperf.workers import channel
from ddpperf.workers.channel import SlowMessage, limit_pauses, receive, send


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_in_order_until_the_end(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    messages: list[channel.Message] = [
        {"command": "sample", "ranks": [0, None], "seconds": 0.1},
        {"text": "ü" * 1000},
    ]
    for message in messages:
        send(theirs, message)
    theirs.close()
    assert [receive(ours), receive(ours)] == messages
    with pytest.raises(EOFError, match=r"^$"):
        receive(ours)


def test_default_timeout_of_other_code_keeps_connections_blocking(
    ends: tuple[Connection, Connection],
) -> None:
    socket.setdefaulttimeout(0.5)
    try:
        limit_pauses(ends[0])
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(ends[0].fileno())


def test_nan_is_not_sent(ends: tuple[Connection, Connection]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        send(ends[1], {"seconds": math.nan})
    assert not ends[0].poll()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pickle.dumps({"seconds": 1}), "codec can't decode"),
        (b"[1]", "must be a JSON object, got list"),
        (b'{"seconds": NaN}', "NaN is no number"),
    ],
)
def test_what_is_no_message_is_a_value_error(
    ends: tuple[Connection, Connection], content: bytes, why: str
) -> None:
    ends[1].send_bytes(content)
    with pytest.raises(ValueError, match=why):
        receive(ends[0])


def test_silence_and_half_a_message_have_a_limit(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    with pytest.raises(SlowMessage, match=r"^sent no message within 0\.1 s$"):
        receive(ours, 0.1)
    limit_pauses(ours, 0.1)
    os.write(theirs.fileno(), b"\0\0\0\x40half a message")
    with pytest.raises(SlowMessage, match=r"^sent only a part of a message within 5 s$"):
        receive(ours)
    with pytest.raises(BlockingIOError, match="unavailable"):
        send(ours, {"text": "x" * 2**24})
