"""The agent of a node: it joins a run, and starts, watches and ends the ranks of its node.

It ends when the controller ends, and ends its ranks first. It does the same if it hears nothing of
the controller for some seconds, because then the network is cut or the controller's node is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection as waiting
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddpperf.data import cache
from ddpperf.errors import Refused
from ddpperf.machine.cores import Pinning
from ddpperf.machine.device_lock import lock_devices
from ddpperf.machine.hardware import Gpu
from ddpperf.node.facts import machine_id
from ddpperf.node.handshake import LOST_SECONDS, AuthenticationError, connect
from ddpperf.specs import DATA_VARIABLE
from ddpperf.workers import channel
from ddpperf.workers.channel import Message
from ddpperf.workers.interpreter import Side
from ddpperf.workers.rank_process import RankProcess, wait_for_stacks

WAKE_SECONDS = 0.2


class ContactLost(Exception):
    """Raised if the controller ended without a goodbye, or was silent for too long."""


@dataclass(kw_only=True)
class Ranks:
    """The ranks of one process set on this node, by their tokens, and their private folder."""

    folder: Path
    running: dict[str, RankProcess] = field(default_factory=dict)
    exits: dict[str, int] = field(default_factory=dict)  # pidfds, readable once the process has ended


class Agent:
    """Carries out the controller's commands on this node until the controller says goodbye.

    address: of the controller. number: this node's number. gpus: the GPUs of this node's ranks; empty
    on the CPU. interface: the network interface that gloo and NCCL use here. say: called with each
    line for the user.
    """

    def __init__(
        self,
        controller: Connection,
        address: tuple[str, int],
        key: bytes,
        *,
        gpus: list[Gpu],
        interface: str,
        say: Callable[[str], None],
    ) -> None:
        self._controller, self._address, self._key = controller, address, key
        self._gpus, self._interface, self._say = gpus, interface, say
        self._number = 0
        self._sets: dict[str, Ranks] = {}
        self._data_path: Path | None = None
        self._sending = threading.Lock()
        self._locks = contextlib.ExitStack()

    def serve(self, welcome: Message) -> None:
        """Carry out commands. Raises ContactLost, or Refused if the controller refuses this node."""
        self._number = int(welcome["node"])
        heard = time.monotonic()
        try:
            while True:
                ended = {ranks.exits[token]: (ranks, token) for ranks, token, _ in self._all()}
                for ready in waiting.wait([self._controller, *ended], WAKE_SECONDS):
                    if isinstance(ready, int):
                        self._report_end(*ended[ready])
                        continue
                    heard = time.monotonic()
                    message = channel.receive(self._controller)
                    if "goodbye" in message:
                        return
                    if "refused" in message:
                        raise Refused(str(message["refused"]))
                    self._carry_out(message, welcome)
                if time.monotonic() - heard > LOST_SECONDS:
                    raise ContactLost(f"the controller was silent for {LOST_SECONDS:g} s")
        except (EOFError, OSError) as error:
            raise ContactLost("the controller has ended, or the network is cut") from error
        finally:
            self._end_all()

    def _carry_out(self, message: Message, welcome: Message) -> None:
        match message:
            case {"ping": number}:
                self._answer({"pong": number, "time": time.time()})
            case {"prepare": _}:
                threading.Thread(target=self._prepare, args=[welcome], daemon=True).start()
            case {"start": token}:
                self._start(str(token), message)
            case {"kill": token}:
                for _, other, rank in self._all():
                    if other == token:
                        rank.kill()
            case {"stacks": token}:
                threading.Thread(target=self._send_stacks, args=[str(token)], daemon=True).start()

    def _answer(self, message: Message) -> None:
        with self._sending:
            channel.send(self._controller, message)

    def _all(self) -> list[tuple[Ranks, str, RankProcess]]:
        return [
            (ranks, token, rank) for ranks in self._sets.values() for token, rank in ranks.running.items()
        ]

    # --- commands

    def _prepare(self, welcome: Message) -> None:
        """Lock this node's devices, decode the images, and choose the CPU cores of the ranks."""
        found: dict[str, Any] = {"problem": "", "digest": "", "cores": None}
        try:
            if self._gpus or welcome["machine"] != machine_id():  # else the controller has the lock
                self._locks = lock_devices([gpu.uuid for gpu in self._gpus] or ["cpu"])
            data = cache.prepare(str(welcome["data"]), Path(".ddpperf/data"), self._say)
            pinning = Pinning()
            pinning.plan(int(welcome["ranks"]), self._gpus)
            self._data_path = data.path
            found |= {"digest": data.digest, "cores": pinning.ranks}
        except Refused as refused:
            found["problem"] = str(refused)
        with contextlib.suppress(OSError):  # `serve` notices that the controller has ended
            self._answer({"prepare": found})

    def _start(self, token: str, message: Message) -> None:
        """Start a rank with a connection of its own to the controller."""
        name = str(message["set"])
        if name not in self._sets:
            self._sets[name] = Ranks(folder=Path(tempfile.mkdtemp(prefix="ddpperf-")))
        ranks, rank = self._sets[name], int(message["rank"])
        folder = ranks.folder / name
        folder.mkdir(exist_ok=True)
        try:
            logs = ranks.folder if message["log_folder"] is None else Path(message["log_folder"])
            logs.mkdir(parents=True, exist_ok=True)
            with connect(self._address, self._key) as connection:
                channel.send(connection, {"rank": token, "node": self._number})
                with socket.socket(fileno=os.dup(connection.fileno())) as theirs:
                    ranks.running[token] = RankProcess(
                        rank,
                        theirs,
                        node_rank=int(message["node_rank"]),
                        device=str(message["device"]),
                        side=self._side(message["side"]),
                        log=logs / f"{name}-rank{rank}.log",
                        folder=folder,
                        interface=self._interface,
                    )
            ranks.exits[token] = os.pidfd_open(ranks.running[token].pid)
        except (OSError, AuthenticationError) as error:
            self._answer({"ended": token, "what": f"could not be started: {error}", "detail": ""})
            self._remove_if_empty(ranks)

    def _side(self, described: Message) -> Side:
        root, environment = described["root"], dict(described["environment"])
        if DATA_VARIABLE in environment and self._data_path is not None:
            environment[DATA_VARIABLE] = str(self._data_path)
        return Side(
            name=str(described["name"]),
            python=described["python"] or sys.executable,
            root=None if root is None else Path(root),
            environment=environment,
        )

    def _send_stacks(self, token: str) -> None:
        for _, other, rank in self._all():
            if other == token:
                rank.ask_for_stacks()
                wait_for_stacks([rank])
                with contextlib.suppress(OSError):
                    self._answer({"stacks": token, "text": rank.stacks()})

    # --- ends

    def _report_end(self, ranks: Ranks, token: str) -> None:
        rank = ranks.running.pop(token)
        os.close(ranks.exits.pop(token))
        failure = rank.death()
        rank.kill()  # what the rank had started
        self._answer({"ended": token, "what": failure.what, "detail": failure.detail})
        self._remove_if_empty(ranks)

    def _remove_if_empty(self, ranks: Ranks) -> None:
        if not ranks.running:
            self._sets = {name: other for name, other in self._sets.items() if other is not ranks}
            shutil.rmtree(ranks.folder, ignore_errors=True)

    def _end_all(self) -> None:
        for _, _, rank in self._all():
            rank.kill()
        for ranks in self._sets.values():
            for rank in ranks.running.values():
                rank.wait()
            shutil.rmtree(ranks.folder, ignore_errors=True)
        self._sets.clear()
        self._controller.close()
        self._locks.close()
