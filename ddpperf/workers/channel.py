"""Exchange JSON messages between the controller process and a rank or an agent.

A rank of the controller's node has a pair of sockets, which no other process can open. Others have
a TCP connection, on which both ends have proved that they know the key. Nothing that arrives is
unpickled, imported or called. A closed connection means that the process at the other end is dead.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from multiprocessing.connection import Connection
from typing import Any

from ddpperf.foreign_text import finite_json

Message = dict[str, Any]
MOST_BYTES = 2**22  # of a message: a longer one is refused before its content is read
PAUSE_SECONDS = 5.0  # the longest pause within a message
MESSAGE_SECONDS = 5.0  # from the first byte of a message to its last


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


class SlowMessage(TimeoutError):
    """Raised if the rest of a message does not arrive within MESSAGE_SECONDS."""


class Receiver:
    """Reads the messages of a connection piece by piece, without waiting for the rest of a message."""

    def __init__(self, channel: Connection, most_bytes: int = MOST_BYTES) -> None:
        self._channel, self._most_bytes = channel, most_bytes
        self._held = bytearray()
        self._ends = math.inf  # when the message must be complete

    def read(self) -> Message | None:
        """Return the next message, or None if the rest of it has yet to arrive.

        Raises EOFError if the connection is closed, OSError if it is broken, SlowMessage, and
        ValueError if the message is longer than `most_bytes` or no JSON object of finite numbers.
        """
        while (missing := self._missing()) and self._channel.poll(0):
            piece = os.read(self._channel.fileno(), min(missing, 2**20))
            if not piece:
                raise EOFError
            if not self._held:
                self._ends = time.monotonic() + MESSAGE_SECONDS
            self._held += piece
        if missing == 0:
            content, self._held, self._ends = self._held[4:], bytearray(), math.inf
            return parse(content)
        if self.is_late():
            raise SlowMessage(f"sent only a part of a message within {MESSAGE_SECONDS:g} s")
        return None

    def is_late(self) -> bool:
        """Return whether the rest of a message should have arrived by now."""
        return time.monotonic() > self._ends

    def _missing(self) -> int:
        """Return how many bytes the message still needs, which is at least the rest of its length."""
        if len(self._held) < 4:
            return 4 - len(self._held)
        (length,) = struct.unpack_from("!i", self._held)  # as multiprocessing.connection writes it
        if not 0 <= length <= self._most_bytes:
            raise ValueError(f"a message must have at most {self._most_bytes} bytes, got more")
        return 4 + int(length) - len(self._held)


def receive(channel: Connection, most_bytes: int = MOST_BYTES) -> Message:
    """Wait for the next JSON message. Raises the same errors as `Receiver.read`."""
    receiver = Receiver(channel, most_bytes)
    channel.poll(None)
    while (message := receiver.read()) is None:
        channel.poll(MESSAGE_SECONDS)
    return message


def parse(content: bytes | bytearray) -> Message:
    """Convert the bytes of a message to a JSON object, or raise ValueError."""
    try:
        message = finite_json(content)
    except RecursionError:
        raise ValueError("a message must be JSON, got too many levels") from None
    except ValueError as error:
        raise ValueError(f"a message must be JSON ({error})") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    return message
