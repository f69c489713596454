"""Connections between nodes over TCP, on which both ends have proved that they know the key.

The key is a file that its owner alone may read. Neither end sends it: each answers a random
challenge with a keyed digest (HMAC), as `multiprocessing.connection` does. What follows is neither
encrypted nor signed. On a network that others can change, use a tunnel (docs/nodes.md).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.regular_files import open_regular
from ddpperf.workers.channel import PAUSE_SECONDS, limit_pauses

KEY_BYTES = 32
MOST_KEY_BYTES = 1000  # of the key's file
HANDSHAKE_SECONDS = 5.0  # until a slow stranger is refused
LOST_SECONDS = PAUSE_SECONDS  # until a peer that is silent, or does not acknowledge, counts as lost
# Keepalive messages after one silent second, and then each second.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: int(LOST_SECONDS) - 1}


def make_key(path: Path) -> None:
    """Write a new random key to a file with mode 0600, unless the file exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(fd, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_key(path: Path) -> bytes:
    """Return the key in a file, or raise Refused if others may read the file or it holds no key."""
    try:
        with open_regular(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(MOST_KEY_BYTES).decode(errors="replace")
    except OSError as error:
        why = f"the key file {path} cannot be read ({error.strerror})"
        raise Refused(f"{why}; copy the first node's key file there") from error
    if mode & 0o077:
        raise Refused(f"the key file {path} has mode {mode:04o}, so others may read it; run chmod 600 {path}")
    return parse_key(text, f"the key file {path}")


def parse_key(text: str, where: str) -> bytes:
    """Return the key that a text holds in hexadecimal digits, or raise Refused."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        digits = 2 * KEY_BYTES
        raise Refused(
            f"{where} holds no key of {digits} hexadecimal digits; copy the first node's key file there"
        )
    return key


def accept(accepted: socket.socket, key: bytes) -> Connection:
    """Let the other end of an accepted connection prove that it knows the key, then prove it, too.

    Raises AuthenticationError or OSError. At most 256 bytes are read of a stranger. The caller closes
    `accepted`, too. Shutting it down ends the handshake.
    """
    return _shake_hands(_connection(accepted), key, deliver_challenge, answer_challenge)


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a controller, prove that this process knows the key, and let it prove the same.

    Raises AuthenticationError if the controller has another key, and OSError.
    """
    with socket.create_connection(address, timeout=HANDSHAKE_SECONDS) as connected:
        connection = _connection(connected)
    return _shake_hands(connection, key, answer_challenge, deliver_challenge)


def _shake_hands(
    connection: Connection, key: bytes, *steps: Callable[[Connection, bytes], None]
) -> Connection:
    """Take the steps of a handshake, and return the connection.

    Whatever the other end does wrong raises an AuthenticationError or an OSError, and closes the
    connection.
    """
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
    return connection


def _connection(connected: socket.socket) -> Connection:
    """Return a connection by a socket with a time limit that finds a peer that was cut off.

    The limit holds for each read and write as long as the connection lives.
    """
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS))
    limit_pauses(connected)
    return Connection(os.dup(connected.fileno()))


def shut_down(connection: Connection) -> None:
    """End a connection in both directions, even while another thread waits for its messages."""
    with contextlib.suppress(OSError):  # it has ended, or it is closed
        connected = socket.socket(fileno=os.dup(connection.fileno()))
        with connected:
            connected.shutdown(socket.SHUT_RDWR)
