"""The port of a run on several nodes, which lets in only those who know the run's key.

Only one interface is bound. A stranger who does not know the key gets a random challenge and is
refused. Nothing of what the stranger sends is decoded.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from ddpperf.errors import Refused
from ddpperf.machine.network import Interface
from ddpperf.node.handshake import HANDSHAKE_SECONDS, accept
from ddpperf.workers import channel
from ddpperf.workers.channel import Message

LOG = logging.getLogger("ddpperf.node")
MOST_STRANGERS = 64  # connections at once that have not proved yet that they know the key
LOOK_SECONDS = 1.0  # how often slow strangers are looked for
HELLO_BYTES = 2**16  # of the first message of an agent or a rank

Take = Callable[[Message, Connection, str], None]
Refuse = Callable[[str, Exception], None]


class Listener:
    """Listens on one interface, and passes on each connection whose other end knows the key.

    port: 0 for any free port. address: the HOST:PORT to connect to. take: called with the first
    message, the connection, and the address of the other end. refuse: called for each connection that
    is refused, with a sentence and an exception. Each connection has a thread, which calls take or
    refuse. Raises Refused if the port is in use.
    """

    def __init__(self, interface: Interface, port: int, key: bytes, take: Take, refuse: Refuse) -> None:
        self._key, self._take, self._refuse = key, take, refuse
        self._closed = False
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # since when, the oldest first
        family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
        try:
            self._socket = socket.create_server((interface.address, port), family=family, backlog=1024)
        except OSError as error:
            what = f"--node-port {port} on {interface.name} ({interface.address}) cannot be used"
            why = os.strerror(error.errno or 0)
            raise Refused(f"{what} ({why}); pass another port to all nodes") from error
        self._socket.settimeout(LOOK_SECONDS)
        self.port: int = self._socket.getsockname()[1]
        host = f"[{interface.address}]" if ":" in interface.address else interface.address
        self.address = f"{host}:{self.port}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. May be called again."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        self._thread.join(HANDSHAKE_SECONDS)

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except TimeoutError:
                accepted = None
            except OSError as error:
                self._pause(error)  # such as: too many open files
                continue
            self._end_slow_strangers(accepted)
            if accepted is not None:
                try:
                    threading.Thread(target=self._greet, args=[accepted], daemon=True).start()
                except RuntimeError as error:  # no thread can be started: too many processes
                    self._end_greeting(accepted)
                    accepted.close()
                    self._pause(error)

    def _pause(self, error: Exception) -> None:
        if not self._closed:
            LOG.warning("no agent can join for a moment: %s", error)
            time.sleep(LOOK_SECONDS)

    def _end_slow_strangers(self, accepted: socket.socket | None) -> None:
        """End the connections of slow strangers, and of the oldest one if there are too many."""
        now = time.monotonic()
        with self._lock:
            if accepted is not None:
                self._strangers[accepted] = now
            for stranger, since in list(self._strangers.items()):
                if len(self._strangers) > MOST_STRANGERS or now - since > HANDSHAKE_SECONDS:
                    del self._strangers[stranger]
                    with suppress(OSError):  # it has ended
                        stranger.shutdown(socket.SHUT_RDWR)

    def _end_greeting(self, accepted: socket.socket) -> bool:
        """Remove a connection from the strangers. Returns whether it still was among them."""
        with self._lock:
            return self._strangers.pop(accepted, None) is not None

    def _greet(self, accepted: socket.socket) -> None:
        """Let a stranger prove that it knows the key, and pass the connection on."""
        peer = "a stranger"
        connection: Connection | None = None
        try:
            peer = str(accepted.getpeername()[0])
            connection = accept(accepted, self._key)
            hello = channel.receive(connection, HELLO_BYTES)
            if not self._end_greeting(accepted):
                raise TimeoutError("too slow")
        except (AuthenticationError, OSError, EOFError, ValueError) as error:
            what = f"a connection from {peer} was refused: another key, or no agent; copy the key file there"
            self._refuse(what, error)
            if connection is not None:
                connection.close()
            return
        finally:
            self._end_greeting(accepted)
            accepted.close()
        self._take(hello, connection, peer)
