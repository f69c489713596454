"""TCP connections between the controller and launched ranks, on which both ends have proved a key.

Neither end sends the key: each answers a random challenge with a keyed digest (HMAC), as
`multiprocessing.connection` does. What follows is neither encrypted nor signed. On a network that
others can change, use a tunnel (docs/nodes.md).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.workers.channel import PAUSE_SECONDS, limit_pauses

KEY_VARIABLE = "DDPPERF_KEY"  # holds the key where the nodes share no folder
KEY_BYTES = 32
HANDSHAKE_SECONDS = 5.0  # until a slow stranger is refused
CONNECT_SECONDS = 60.0  # until the controller takes a connection: it takes one rank after the other
LOST_SECONDS = PAUSE_SECONDS  # until a peer that acknowledges nothing counts as lost
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS)),
    # Keepalive messages after one silent second, and then each second.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(LOST_SECONDS) - 1),
)


def shake_hands(connected: socket.socket, key: bytes, seconds: float, *, asks_first: bool) -> Connection:
    """Return a connection on which both ends have proved that they know the key.

    It notices within LOST_SECONDS that the network was cut. connected: a TCP socket, which is taken
    over. seconds: the time limit of each step. asks_first: True for the controller, False for a rank.
    Raises AuthenticationError if the other end has another key, and OSError.
    """
    with connected:
        connected.setblocking(True)
        for level, option, value in _OPTIONS:
            connected.setsockopt(level, option, value)
        connection = Connection(os.dup(connected.fileno()))
    limit_pauses(connection, seconds)
    steps = (deliver_challenge, answer_challenge)
    try:
        for step in steps if asks_first else reversed(steps):
            step(connection, key)
    except BaseException as error:
        connection.close()
        if isinstance(error, AssertionError | EOFError):  # of multiprocessing.connection
            raise AuthenticationError("the other end is no process of this run") from error
        raise
    limit_pauses(connection)
    return connection


def shut_down(connection: Connection) -> None:
    """End a connection in both directions, even while another thread waits for its messages."""
    with (
        contextlib.suppress(OSError),  # it has ended, or it is closed
        socket.socket(fileno=os.dup(connection.fileno())) as connected,
    ):
        connected.shutdown(socket.SHUT_RDWR)


def make_key(path: Path) -> None:
    """Write a new random key to a new file that its owner alone can read, unless KEY_VARIABLE holds one."""
    if KEY_VARIABLE not in os.environ:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a killed run that had the same process id
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(KEY_BYTES))


def read_key(path: Path) -> bytes:
    """Return the key of the run, from KEY_VARIABLE or from a file; raise Refused if it is none."""
    try:
        key = bytes.fromhex(os.environ.get(KEY_VARIABLE) or path.read_text())
    except OSError as error:
        advice = f"share its folder between the nodes, or set {KEY_VARIABLE} on all of them"
        raise Refused(f"the key file {path} cannot be read ({error.strerror}); {advice}") from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise Refused(f"a key has {2 * KEY_BYTES} hexadecimal digits; set another {KEY_VARIABLE}")
    return key
