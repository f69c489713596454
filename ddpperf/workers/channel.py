"""Exchange JSON messages between the controller process and a rank.

A rank that the controller starts has a pair of sockets. A launched rank has a TCP connection, on
which both ends have proved that they know the key. Nothing that arrives is unpickled, imported or
called. A closed connection means that the process at the other end is dead.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

from ddpperf.io.terminal_text import finite_json

Message = dict[str, Any]
PROTOCOL = "can_finish"  # in each answer to "setup"; ranks of incompatible older versions do not have it
PAUSE_SECONDS = 5.0  # the longest pause within a message


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
