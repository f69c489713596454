"""Messages between the controller and its workers: JSON bytes over a Unix socket, both ends proving that they know a key.

Nothing that arrives is ever unpickled, imported or called: a message is plain data. A closed connection is a death.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
from multiprocessing import AuthenticationError, connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Message = dict[str, Any]

HANDSHAKE_SECONDS = 5
LONGEST_PATH = 107


class Listener:
    """The controller's end before it is connected: a socket in a private folder, and the key to it.

    The standard library's own Listener can neither be waited on nor given a time limit; this one can, and leaves the
    handshake to the standard library.
    """

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise ValueError(
                f"a socket's path has at most {LONGEST_PATH} bytes, got {path}; set TMPDIR to a shorter folder"
            )
        self.path = path
        self.key = secrets.token_bytes(32)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(path))
        self._socket.listen(128)

    def accept(self, timeout_seconds: float) -> tuple[Connection, Message] | None:
        """The next peer that knows the key, and its first message; None if none came in time, or it did not know it."""
        self._socket.settimeout(timeout_seconds)
        try:
            peer, _ = self._socket.accept()
        except TimeoutError:
            return None
        return _authenticated(peer, self.key)

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def _authenticated(peer: socket.socket, key: bytes) -> tuple[Connection, Message] | None:
    """The peer after a handshake in both directions and its first message; a silent one cannot hold that up for long."""
    with peer:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(HANDSHAKE_SECONDS))
        channel = Connection(os.dup(peer.fileno()))
        try:
            connection.deliver_challenge(channel, key)
            connection.answer_challenge(channel, key)
            hello = receive(channel)
        except (AuthenticationError, EOFError, OSError):
            channel.close()
            return None
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0))  # both descriptors share it
        return channel, hello


def _timeval(seconds: int) -> bytes:
    """The C struct timeval that SO_RCVTIMEO takes; 0 means no limit."""
    return struct.pack("ll", seconds, 0)


def connect(path: str, key: bytes) -> Connection:
    """The worker's end; raises AuthenticationError if the listener does not know the key."""
    return connection.Client(path, family="AF_UNIX", authkey=key)


def send(channel: Connection, message: Message) -> None:
    channel.send_bytes(json.dumps(message, allow_nan=False).encode())


def receive(channel: Connection) -> Message:
    message = json.loads(channel.recv_bytes())
    assert isinstance(message, dict)
    return message
