"""Exchange JSON messages between the controller process and a rank over a pair of sockets.

No other process can open the pair. Nothing that arrives is unpickled, imported or called. A closed
connection means that the process at the other end is dead.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]


def send(channel: Connection, message: Message) -> None:
    """Send a JSON message, or raise ValueError if it contains a NaN or an infinity."""
    channel.send_bytes(json.dumps(message, allow_nan=False).encode())


def receive(channel: Connection) -> Message:
    """Wait for the next JSON message, or raise EOFError if the connection is closed."""
    message = json.loads(channel.recv_bytes())
    assert isinstance(message, dict)
    return message
