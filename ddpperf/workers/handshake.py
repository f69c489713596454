"""TCP connections between the controller and launched ranks, on which both ends have proved a key.

Neither end sends the key: each answers a random challenge with a keyed digest (HMAC), as
`multiprocessing.connection` does. What follows is neither encrypted nor signed. On a network that
others can change, use a tunnel (docs/nodes.md).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from ddpperf.workers.channel import PAUSE_SECONDS, limit_pauses

HANDSHAKE_SECONDS = 5.0  # until a slow stranger is refused
CONNECT_SECONDS = 60.0  # until the controller takes a connection: it takes one rank after the other
LOST_SECONDS = PAUSE_SECONDS  # until a peer that acknowledges nothing counts as lost
# Keepalive messages after one silent second, and then each second.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: int(LOST_SECONDS) - 1}


def accept(accepted: socket.socket, key: bytes) -> Connection:
    """Let the other end of an accepted connection prove that it knows the key, then prove it, too.

    Takes the socket over. Raises AuthenticationError or OSError.
    """
    with accepted:
        connection = _connection(accepted, HANDSHAKE_SECONDS)
    return _shake_hands(connection, key, deliver_challenge, answer_challenge)


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a controller, prove that this process knows the key, and let it prove the same.

    Raises AuthenticationError if the controller has another key, and OSError.
    """
    with socket.create_connection(address, timeout=HANDSHAKE_SECONDS) as connected:
        connection = _connection(connected, CONNECT_SECONDS)
    return _shake_hands(connection, key, answer_challenge, deliver_challenge)


def _shake_hands(
    connection: Connection, key: bytes, *steps: Callable[[Connection, bytes], None]
) -> Connection:
    """Take the steps of a handshake, and return the connection, or close it and raise an error."""
    try:
        for step in steps:
            step(connection, key)
    except BaseException as error:
        connection.close()
        if isinstance(error, EOFError):
            raise ConnectionResetError(0, "the connection was closed during the handshake") from error
        if isinstance(error, BlockingIOError):
            raise TimeoutError(0, "no answer came during the handshake") from error
        if isinstance(error, AssertionError):  # of multiprocessing.connection
            raise AuthenticationError("no challenge came") from error
        raise
    limit(connection, PAUSE_SECONDS)
    return connection


def _connection(connected: socket.socket, seconds: float) -> Connection:
    """Return a connection by a socket that notices within LOST_SECONDS that the network was cut.

    seconds: the time limit of each read and write.
    """
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS))
    limit_pauses(connected, seconds)
    return Connection(os.dup(connected.fileno()))


def limit(connection: Connection, seconds: float) -> None:
    """Let each read and write of a connection fail after so many seconds; 0 means no limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as connected:
        limit_pauses(connected, seconds)


def shut_down(connection: Connection) -> None:
    """End a connection in both directions, even while another thread waits for its messages."""
    with contextlib.suppress(OSError):  # it has ended, or it is closed
        connected = socket.socket(fileno=os.dup(connection.fileno()))
        with connected:
            connected.shutdown(socket.SHUT_RDWR)
