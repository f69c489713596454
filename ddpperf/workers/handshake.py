"""The handshake of the controller and a launched rank: TCP connections, a proved key, equal nodes.

Neither end sends the key: each answers a random challenge with a keyed digest (HMAC), as
`multiprocessing.connection` does. What follows is neither encrypted nor signed. On a network that
others can change, use a tunnel (docs/nodes.md).
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from importlib import metadata
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import ddpperf
from ddpperf.machine.hardware import hardware_key, visible_gpus
from ddpperf.workers.channel import PAUSE_SECONDS, limit_pauses

KEY_VARIABLE = "DDPPERF_KEY"  # holds the key where the nodes share no folder
HANDSHAKE_SECONDS = 5.0  # until a slow stranger is refused
LOST_SECONDS = PAUSE_SECONDS  # until a peer that acknowledges nothing counts as lost
COMPARED_BYTES = 2**20  # at the end of the file of images, where an archive has checksums
_PACKAGE = Path(ddpperf.__file__).parent
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_SECONDS)),
    # Keepalive messages after one silent second, and then each second.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(LOST_SECONDS) - 1),
)


def shake_hands(connected: socket.socket, key: bytes, seconds: float, *, asks_first: bool) -> Connection:
    """Return a connection on which both ends have proved that they know the key.

    It notices within LOST_SECONDS that the network was cut. connected: a TCP socket, which is taken
    over. seconds: the time limit of each step. asks_first: True for the controller, False for a rank.
    Raises AuthenticationError if the other end has another key, and OSError.
    """
    connected.setblocking(True)
    for level, option, value in _OPTIONS:
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


def machine_id() -> str:
    """Return an identifier of this machine and its process ids, which changes at each boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def node_facts(device: str, images: str) -> dict[str, str]:
    """Return the facts of this node that must be equal on all nodes, so that times can be compared.

    device: "cuda" or "cpu". images: the file of decoded images, or "" for synthetic images.
    """
    gpus = visible_gpus() if device == "cuda" else []
    code = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        code.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    found = "none"
    try:
        if images:
            with open(images, "rb") as file:
                file.seek(max(0, (size := os.path.getsize(images)) - COMPARED_BYTES))
                found = f"{size} bytes, {hashlib.sha256(file.read()).hexdigest()[:12]}"
    except OSError as error:
        found = f"missing ({error.strerror}: {images})"
    return {
        "hardware": hardware_key(device, gpus),
        "GPU driver": str(gpus[0].driver) if gpus else "none",
        "torch": metadata.version("torch"),
        "Python": platform.python_version(),
        "code of ddpperf": code.hexdigest()[:12],
        "file of images": found,
    }
