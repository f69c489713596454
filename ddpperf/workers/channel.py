"""Exchange JSON messages between the controller process and a rank.

A rank that the controller starts has a pair of sockets. A launched rank has a TCP connection, on
which both ends have proved that they know the key. What follows is neither encrypted nor signed. On
a network that others can change, use a tunnel (docs/nodes.md). Nothing that arrives is unpickled,
imported or called. A closed connection means that the process at the other end is dead.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from ddpperf.io.terminal_text import finite_json

Message = dict[str, Any]
PROTOCOL = "can_finish"  # in each answer to "setup"; ranks of incompatible older versions do not have it
PAUSE_SECONDS = 5.0  # the longest pause within a message
HANDSHAKE_SECONDS = 5.0  # until a slow stranger is refused
LOST_SECONDS = 5.0  # until a peer that acknowledges nothing counts as lost
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS)),
    # Keepalive messages after one silent second, and then each second.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(LOST_SECONDS) - 1),
)


def socket_of(connection: Connection) -> socket.socket:
    """Return a new socket object for a connection's socket; closing it leaves the connection open."""
    connected = socket.socket(fileno=os.dup(connection.fileno()))
    connected.setblocking(True)  # socket.setdefaulttimeout of other code has made it non-blocking
    return connected


def limit_pauses(connection: Connection, seconds: float = PAUSE_SECONDS) -> None:
    """Let each read and write raise BlockingIOError after `seconds`; 0 means no limit.

    So a peer that stopped within a message, or a cut network, does not block this process for ever.
    """
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket_of(connection) as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def shake_hands(connected: socket.socket, key: bytes, seconds: float, *, asks_first: bool) -> Connection:
    """Return a connection on which both ends have proved that they know the key.

    Neither end sends the key: each answers a random challenge with a keyed digest (HMAC). The
    connection notices within LOST_SECONDS that the network was cut. connected: a TCP socket, which is taken
    over. seconds: the time limit of each step. asks_first: True for the controller, False for a rank.
    Raises AuthenticationError if the other end has another key, and OSError.
    """
    connected.setblocking(True)
    for level, option, value in _TCP_OPTIONS:
        connected.setsockopt(level, option, value)
    connection = Connection(connected.detach())
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


def send(channel: Connection, message: Message) -> None:
    """Send a JSON message, or raise ValueError if it contains a NaN or an infinity."""
    channel.send_bytes(json.dumps(message, allow_nan=False).encode())


class SlowMessage(Exception):
    """Raised if a message, or the rest of it, does not arrive in time."""


def receive(channel: Connection, seconds: float | None = None) -> Message:
    """Wait for the next JSON message.

    seconds: how long to wait for the beginning of the message; None for ever. `limit_pauses` limits
    the time for the rest of it. Raises EOFError if the connection is closed, OSError if it is broken,
    SlowMessage, and ValueError if the message is no JSON object of finite numbers.
    """
    if not channel.poll(seconds):
        raise SlowMessage(f"sent no message within {seconds:g} s")
    try:
        content = channel.recv_bytes()
    except BlockingIOError as error:
        raise SlowMessage(f"sent only a part of a message within {PAUSE_SECONDS:g} s") from error
    message = finite_json(content)
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    return message
