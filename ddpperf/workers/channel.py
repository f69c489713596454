"""Messages between the controller and its ranks: JSON over a Unix socket with authentication.

Nothing that arrives is unpickled, imported or called. A closed connection means that the other end
is dead.
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
MAX_PATH_BYTES = 107


class Listener:
    """A socket in a private folder to which ranks connect, and the key that they must know.

    multiprocessing's own Listener has no time limit for `accept`; this class leaves only the
    handshake to it.
    """

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ValueError(
                f"a socket's path has at most {MAX_PATH_BYTES} bytes, got {path}; "
                "set TMPDIR to a shorter folder"
            )
        self.path = path
        self.key = secrets.token_bytes(32)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.fspath(path))
        self._socket.listen(128)

    def accept(self, timeout_seconds: float) -> tuple[Connection, Message] | None:
        """Return the next peer that knows the key and its first message.

        Returns None if no peer connects in time, or if it does not know the key.
        """
        self._socket.settimeout(timeout_seconds)
        try:
            peer, _ = self._socket.accept()
        except TimeoutError:
            return None
        return _authenticate(peer, self.key)

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def _authenticate(peer: socket.socket, key: bytes) -> tuple[Connection, Message] | None:
    """Prove the key to the peer and have it prove the key, within HANDSHAKE_SECONDS per message."""
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
    """Return the C struct timeval that SO_RCVTIMEO takes; 0 seconds mean no limit."""
    return struct.pack("ll", seconds, 0)


def connect(path: str, key: bytes) -> Connection:
    """Connect to the controller; raise AuthenticationError if it does not know the key."""
    return connection.Client(path, family="AF_UNIX", authkey=key)


def send(channel: Connection, message: Message) -> None:
    """Send a message; raise ValueError if it contains a NaN or an infinity."""
    channel.send_bytes(json.dumps(message, allow_nan=False).encode())


def receive(channel: Connection) -> Message:
    """Wait for the next message; raise EOFError if the connection is closed."""
    message = json.loads(channel.recv_bytes())
    assert isinstance(message, dict)
    return message
