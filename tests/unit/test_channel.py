"""The channel on real sockets: authentication, time limits, and messages of JSON only."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ddpperf.workers import channel
from ddpperf.workers.channel import MAX_PATH_BYTES, Listener, connect, receive, send


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "s")
    yield listener
    listener.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def raw_peer(listener: Listener) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(str(listener.path))
    return peer


def accepted(listener: Listener, pool: ThreadPoolExecutor) -> tuple[Connection, Connection]:
    """Both ends of a connection between those who know the key."""
    ours = pool.submit(listener.accept, 5)
    theirs = connect(str(listener.path), listener.key)
    send(theirs, {"rank": 3})
    accepted = ours.result()
    assert accepted is not None
    found, hello = accepted
    assert hello == {"rank": 3}
    return found, theirs


def test_messages_pass_both_ways(listener: Listener, pool: ThreadPoolExecutor) -> None:
    ours, theirs = accepted(listener, pool)
    with ours, theirs:
        send(ours, {"command": "sample", "ranks": [0, 1], "seconds": 0.1})
        send(ours, {"command": "close", "text": "ü" * 1000})
        assert receive(theirs) == {"command": "sample", "ranks": [0, 1], "seconds": 0.1}
        assert receive(theirs) == {"command": "close", "text": "ü" * 1000}
        send(theirs, {"rank": None})
        assert receive(ours) == {"rank": None}


def test_a_wrong_key_is_turned_away_and_a_right_one_accepted_after_it(
    listener: Listener, pool: ThreadPoolExecutor
) -> None:
    ours = pool.submit(listener.accept, 5)
    with pytest.raises(AuthenticationError, match="digest sent was rejected"):
        connect(str(listener.path), b"x" * 32)
    assert ours.result() is None
    for end in accepted(listener, pool):
        end.close()


def test_each_listener_has_a_key_of_its_own(tmp_path: Path, listener: Listener) -> None:
    other = Listener(tmp_path / "t")
    other.close()
    assert other.key != listener.key
    assert len(other.key) == 32


@pytest.mark.parametrize("letter", ["x", "ü"])
def test_a_path_too_long_for_a_socket_is_refused_in_one_sentence(tmp_path: Path, letter: str) -> None:
    room = MAX_PATH_BYTES - len(os.fsencode(tmp_path)) - 1
    size = len(letter.encode())
    longest = tmp_path / (letter * (room // size) + "x" * (room % size))
    listener = Listener(longest)
    listener.close()
    too_long = longest.with_name(longest.name + "x")
    with pytest.raises(
        ValueError, match=r"^a socket's path has at most 107 bytes, got .*; set TMPDIR to a shorter folder$"
    ):
        Listener(too_long)


@pytest.mark.parametrize("knows_the_key", [False, True])
def test_a_silent_peer_does_not_hold_the_door(
    listener: Listener, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, knows_the_key: bool
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 1)
    ours = pool.submit(listener.accept, 5)
    start = time.monotonic()
    with connect(str(listener.path), listener.key) if knows_the_key else raw_peer(listener):
        assert ours.result() is None
        assert 0.9 < time.monotonic() - start < 3
    for end in accepted(listener, pool):
        end.close()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff" * 4, b"\x00\x00\x00\x04abcd"]
)
def test_who_talks_otherwise_is_turned_away_at_once(
    listener: Listener, pool: ThreadPoolExecutor, said: bytes
) -> None:
    with raw_peer(listener) as peer:
        peer.sendall(said)
        peer.shutdown(socket.SHUT_WR)
        start = time.monotonic()
        assert listener.accept(5) is None
        assert time.monotonic() - start < 2
    for end in accepted(listener, pool):
        end.close()


def test_waiting_for_nobody_ends(listener: Listener) -> None:
    start = time.monotonic()
    assert listener.accept(0.1) is None
    assert 0.09 < time.monotonic() - start < 2


def test_after_the_handshake_a_peer_may_take_its_time(
    listener: Listener, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_SECONDS", 1)
    ours, theirs = accepted(listener, pool)
    with ours, theirs:
        late = threading.Timer(1.3, send, [theirs, {"seconds": 0.1}])
        late.start()
        assert receive(ours) == {"seconds": 0.1}
        late.join()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_not_sent(
    listener: Listener, pool: ThreadPoolExecutor, seconds: float
) -> None:
    ours, theirs = accepted(listener, pool)
    with ours, theirs:
        with pytest.raises(ValueError, match="not JSON compliant"):
            send(theirs, {"seconds": seconds})
        assert not ours.poll()


def test_a_pickle_is_never_opened(listener: Listener, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "exploded",)

    ours, theirs = accepted(listener, pool)
    with ours, theirs:
        theirs.send(Bomb())
        with pytest.raises(ValueError, match="can't decode byte"):
            receive(ours)
    assert not (tmp_path / "exploded").exists()


def test_a_closed_listener_leaves_no_socket(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "u")
    assert (tmp_path / "u").exists()
    listener.close()
    assert list(tmp_path.iterdir()) == []
    listener.close()
