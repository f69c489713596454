"""Exchange JSON messages between the controller process and a rank or an agent.

A rank of the controller's node has a pair of sockets, which no other process can open. Others have
a TCP connection, on which both ends have proved that they know the key. Nothing that arrives is
unpickled, imported or called. A closed connection means that the process at the other end is dead.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]
MOST_BYTES = 2**26  # of a message: a longer one is refused before its content is read


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
