"""The agent of a node: it joins a run, and starts, watches and ends the ranks of its node.

It ends when the controller ends, and ends its ranks first. It does the same if it hears nothing of
the controller for some seconds, because then the network is cut or the controller's node is gone.
SIGTERM, SIGHUP and SIGINT end it between two messages, so that nothing half done is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection as waiting
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ddpperf.data import cache
from ddpperf.errors import Refused
from ddpperf.machine.child_process import describe_exit
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
DECODER_SECONDS = 5.0  # until a killed decoder's files are removed
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class ContactLost(Exception):
    """Raised if the controller ended without a goodbye, or was silent for too long."""


def handle_ending(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle the signals that end this process, but those that nohup or a shell has let it ignore."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A rank of this node. exit: a pidfd, which is readable once the rank's process has ended."""

    token: str
    set_name: str
    process: RankProcess
    exit: int


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
        self._ranks: dict[str, Running] = {}  # by their tokens
        self._folders: dict[str, Path] = {}  # the private folder of each process set
        self._preparing: threading.Thread | None = None
        self._signal: signal.Signals | None = None  # that ends this agent
        self._woken, self._wake = os.pipe()  # readable after a signal
        self._data_path: Path | None = None
        self._sending = threading.Lock()
        self._locks = contextlib.ExitStack()

    def serve(self, welcome: Message) -> None:
        """Carry out commands to the end of the run.

        Raises ContactLost, Refused if the controller refuses this node, and SystemExit after a signal.
        """
        silent = f"pytest on the first node was silent for {LOST_SECONDS:g} s, or the network is cut"
        handle_ending(self._note_signal)
        try:
            self._number = int(welcome["node"])
            heard = time.monotonic()
            while self._signal is None:
                ended = {running.exit: running for running in self._ranks.values()}
                ready = waiting.wait([self._controller, self._woken, *ended], WAKE_SECONDS)
                for one in ready:
                    if isinstance(one, int) and one in ended:
                        self._report_end(ended[one])
                if self._controller in ready:
                    message = channel.receive(self._controller)
                    if "goodbye" in message:
                        return
                    if "refused" in message:
                        raise Refused(str(message["refused"]))
                    self._carry_out(message, welcome)
                    heard = time.monotonic()
                elif time.monotonic() - heard > LOST_SECONDS:
                    raise ContactLost(silent)
            self._answer({"leaving": self._signal.name})
            raise SystemExit(128 + self._signal)
        except (BlockingIOError, TimeoutError) as error:
            raise ContactLost(silent) from error
        except (EOFError, OSError) as error:
            raise ContactLost("pytest on the first node has ended, or the network is cut") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ContactLost(
                f"pytest on the first node sent a message that this agent cannot read ({error!r})"
            ) from error
        finally:
            self._end_all()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number)
        os.write(self._wake, b"!")

    def _carry_out(self, message: Message, welcome: Message) -> None:
        match message:
            case {"ping": number}:
                self._answer({"pong": number, "time": time.time()})
            case {"prepare": _}:
                self._preparing = threading.Thread(target=self._prepare, args=[welcome], daemon=True)
                self._preparing.start()
            case {"start": token}:
                self._start(str(token), message)
            case {"kill": token}:
                if token in self._ranks:
                    self._ranks[token].process.kill()
            case {"stacks": token}:
                if token in self._ranks:
                    running = self._ranks[token]
                    threading.Thread(target=self._send_stacks, args=[running], daemon=True).start()

    def _answer(self, message: Message) -> None:
        # A closed connection may still hold a goodbye, or why this node is refused: it is read to its end.
        with self._sending, contextlib.suppress(ConnectionError):
            channel.send(self._controller, message)

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
        except Exception as error:  # or the controller would wait for an answer
            found["problem"] = f"its agent could not prepare it: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # `serve` notices that the controller has ended
            self._answer({"prepare": found})

    def _start(self, token: str, message: Message) -> None:
        """Start a rank with a connection of its own to the controller."""
        name, rank = str(message["set"]), int(message["rank"])
        try:
            if name not in self._folders:
                self._folders[name] = Path(tempfile.mkdtemp(prefix="ddpperf-"))
            folder = self._folders[name] / name
            folder.mkdir(exist_ok=True)
            logs = self._folders[name] if message["log_folder"] is None else Path(message["log_folder"])
            logs.mkdir(parents=True, exist_ok=True)
            with connect(self._address, self._key) as connection:
                channel.send(connection, {"rank": token, "node": self._number})
                with socket.socket(fileno=os.dup(connection.fileno())) as theirs:
                    channel.limit_pauses(theirs, 0)  # a rank may wait for its next command for hours
                    process = RankProcess(
                        rank,
                        theirs,
                        node_rank=int(message["node_rank"]),
                        device=str(message["device"]),
                        side=self._side(message["side"]),
                        log=logs / f"{name}-rank{rank}.log",
                        folder=folder,
                        interface=self._interface,
                    )
            exit = os.pidfd_open(process.pid)
            self._ranks[token] = Running(token=token, set_name=name, process=process, exit=exit)
        except (OSError, AuthenticationError) as error:
            self._answer({"ended": token, "what": f"could not be started: {error}", "detail": ""})
            self._remove_if_empty(name)

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

    def _send_stacks(self, running: Running) -> None:
        with contextlib.suppress(OSError):  # the rank has ended, or the controller
            running.process.ask_for_stacks()
            wait_for_stacks([running.process])
            self._answer({"stacks": running.token, "text": running.process.stacks()})

    # --- ends

    def _report_end(self, running: Running) -> None:
        del self._ranks[running.token]
        os.close(running.exit)
        try:
            failure = running.process.death()
            what, detail = failure.what, failure.detail
        except OSError:  # a rank whose connection has closed removes its folder with the log
            what, detail = describe_exit(running.process.process), ""
        running.process.kill()  # what the rank had started
        self._answer({"ended": running.token, "what": what, "detail": detail})
        self._remove_if_empty(running.set_name)

    def _remove_if_empty(self, set_name: str) -> None:
        if all(running.set_name != set_name for running in self._ranks.values()):
            shutil.rmtree(self._folders.pop(set_name, ""), ignore_errors=True)

    def _end_all(self) -> None:
        for child in psutil.Process().children():  # the ranks, and what decodes images
            with contextlib.suppress(psutil.Error):
                child.kill()
        for running in self._ranks.values():
            running.process.kill()  # what the rank had started, too
            running.process.wait()
            os.close(running.exit)
        self._ranks.clear()
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        if self._preparing is not None:
            self._preparing.join(DECODER_SECONDS)
        self._controller.close()
        self._locks.close()
