"""Exchange JSON messages between the controller process and a rank or an agent.

A rank of the controller's node has a pair of sockets, which no other process can open. Others have
a TCP connection, on which both ends have proved that they know the key. Nothing that arrives is
unpickled, imported or called. A closed connection means that the process at the other end is dead.
"""

from __future__ import annotations

import json
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]
MOST_BYTES = 2**26  # of a message: a longer one is refused before its content is read
PAUSE_SECONDS = 5.0  # the longest pause within a message


def limit_pauses(connected: socket.socket, seconds: float = PAUSE_SECONDS) -> None:
    """Let each read and write of a socket raise BlockingIOError after so long; 0 means no limit.

    A process that was stopped within a message, or a cut network, then blocks its peer no longer.
    """
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send(channel: Connection, message: Message) -> None:
    """Send a JSON message, or raise ValueError if it contains a NaN or an infinity."""
    channel.send_bytes(json.dumps(message, allow_nan=False).encode())


def receive(channel: Connection, most_bytes: int = MOST_BYTES) -> Message:
    """Wait for the next JSON message.

    Raises EOFError if the connection is closed, OSError if the message is longer than `most_bytes`,
    and ValueError if it is no JSON object.
    """
    message = json.loads(channel.recv_bytes(most_bytes))
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    return message
