"""The agent of a node: it joins a run, and starts, watches and ends the ranks of its node.

It ends when the controller ends, and ends its ranks first. It does the same if it hears nothing of
the controller for some seconds, because then the network is cut or the controller's node is gone.
SIGTERM, SIGHUP and SIGINT end it between two messages, so that nothing half done is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import connection as waiting
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ddpperf.data import cache
from ddpperf.errors import Refused
from ddpperf.machine.cores import Pinning
from ddpperf.machine.device_lock import lock_devices
from ddpperf.machine.hardware import Gpu
from ddpperf.node.agent_ranks import AgentRanks
from ddpperf.node.facts import machine_id
from ddpperf.node.handshake import LOST_SECONDS
from ddpperf.workers import channel
from ddpperf.workers.channel import Message

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
        self._controller, self._gpus, self._say = controller, gpus, say
        self._ranks = AgentRanks(address, key, interface)
        self._preparing: threading.Thread | None = None
        self._signal: signal.Signals | None = None  # that ends this agent
        self._wake = os.pipe()  # readable after a signal
        self._sending = threading.Lock()
        self._locks = contextlib.ExitStack()

    def serve(self, welcome: Message) -> None:
        """Carry out commands to the end of the run.

        Raises ContactLost, Refused if the controller refuses this node, and SystemExit after a signal.
        """
        silent = f"pytest on the first node was silent for {LOST_SECONDS:g} s, or the network is cut"
        handle_ending(self._note_signal)
        try:
            node = int(welcome["node"])
            heard = time.monotonic()
            while self._signal is None:
                exits = self._ranks.exits()
                ready = waiting.wait([self._controller, self._wake[0], *exits], WAKE_SECONDS)
                for one in ready:
                    if isinstance(one, int) and one in exits:
                        self._answer(self._ranks.end_of(exits[one]))
                if self._controller in ready:
                    message = channel.receive(self._controller)
                    if "goodbye" in message:
                        return
                    if "refused" in message:
                        raise Refused(str(message["refused"]))
                    self._carry_out(message, node, welcome)
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
        os.write(self._wake[1], b"!")

    def _carry_out(self, message: Message, node: int, welcome: Message) -> None:
        match message:
            case {"ping": number}:
                self._answer({"pong": number, "time": time.time()})
            case {"prepare": _}:
                self._preparing = threading.Thread(target=self._prepare, args=[welcome], daemon=True)
                self._preparing.start()
            case {"start": token}:
                if (failure := self._ranks.start(str(token), node, message)) is not None:
                    self._answer(failure)
            case {"kill": token}:
                self._ranks.kill(str(token))
            case {"stacks": token}:
                threading.Thread(target=self._send_stacks, args=[str(token)], daemon=True).start()

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
            self._ranks.data_path = data.path
            found |= {"digest": data.digest, "cores": pinning.ranks}
        except Refused as refused:
            found["problem"] = str(refused)
        except Exception as error:  # or the controller would wait for an answer
            found["problem"] = f"its agent could not prepare it: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # `serve` notices that the controller has ended
            self._answer({"prepare": found})

    def _send_stacks(self, token: str) -> None:
        with contextlib.suppress(OSError):  # the rank has ended, or the controller
            if stacks := self._ranks.stacks(token):
                self._answer({"rank": token, "stacks": stacks})

    def _end_all(self) -> None:
        for child in psutil.Process().children():  # the ranks, and what decodes images
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._ranks.end_all()
        if self._preparing is not None:
            self._preparing.join(DECODER_SECONDS)
        self._controller.close()
        self._locks.close()
