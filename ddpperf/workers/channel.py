"""Exchange JSON messages between the controller process and a rank, and check the rank's answers.

A rank that the controller starts has a pair of sockets. A launched rank has a TCP connection, on
which both ends have proved that they know the key. Nothing that arrives is unpickled, imported or
called. A closed connection means that the process at the other end is dead.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import UnionType
from typing import Any

from ddpperf.errors import quoted
from ddpperf.io.terminal_text import finite_json

Message = dict[str, Any]
PAUSE_SECONDS = 5.0  # the longest pause within a message
MESSAGE_SECONDS = 5.0  # from the first byte of a message to its last


def limit_pauses(connection: Connection, seconds: float = PAUSE_SECONDS) -> None:
    """Let each read and write of a connection raise BlockingIOError after so long; 0 means no limit.

    A process that was stopped within a message, or a cut network, then blocks its peer no longer.
    """
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send(channel: Connection, message: Message) -> None:
    """Send a JSON message, or raise ValueError if it contains a NaN or an infinity."""
    channel.send_bytes(json.dumps(message, allow_nan=False).encode())


class SlowMessage(Exception):
    """Raised if the rest of a message does not arrive within MESSAGE_SECONDS."""


class Receiver:
    """Reads the messages of a connection piece by piece, without waiting for the rest of a message."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._held = bytearray()
        self._ends = math.inf  # when the message must be complete

    def read(self) -> Message | None:
        """Return the next message, or None if the rest of it has yet to arrive.

        Raises EOFError if the connection is closed, OSError if it is broken, SlowMessage, and
        ValueError if the message is no JSON object of finite numbers.
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
            return _parse(content)
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
        return 4 + int(length) - len(self._held)


def receive(channel: Connection, seconds: float | None = None) -> Message:
    """Wait for the next JSON message. Raises the same errors as `Receiver.read`.

    seconds: how long to wait for the beginning of the message; None for ever.
    """
    receiver = Receiver(channel)
    if not channel.poll(seconds):
        raise SlowMessage(f"sent no message within {seconds:g} s")
    while (message := receiver.read()) is None:
        channel.poll(MESSAGE_SECONDS)
    return message


def _parse(content: bytearray) -> Message:
    try:
        message = finite_json(content)
    except ValueError as error:
        raise ValueError(f"a message must be JSON ({error})") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    return message


# What the answer to a command must hold. A rank may run another version of ddpperf.
NEEDED: Mapping[str, Mapping[str, type | UnionType]] = {
    "setup": {"environment": dict},
    "open": {"max_iterations": int | float},
    "sample": {"seconds": int | float},
    "finish": {"counters": dict},
    "close": {"counters": dict},
}
ERROR = {"summary": str, "traceback": str, "distributed": bool}


def problem_of(command: str, answer: Message) -> str:
    """Return what is wrong with the answer to a command, or an empty string.

    Unknown fields are ignored, because a newer version may send them.
    """
    needed = NEEDED.get(command, {})
    if "progress" in answer:
        needed = {"progress": int | float}
    elif "error" in answer:
        needed, answer = ERROR, dict(answer["error"])
    for name, kind in needed.items():
        if name not in answer:
            return f"{name} is missing"
        if not isinstance(answer[name], kind):
            return f"{name} is {quoted(answer[name])}"
    return ""
