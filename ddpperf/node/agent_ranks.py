"""The ranks that a node's agent has started: their processes, their folders and their ends."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from pathlib import Path

from ddpperf.errors import Refused
from ddpperf.foreign_text import shortened
from ddpperf.node.handshake import connect
from ddpperf.specs import DATA_VARIABLE
from ddpperf.temporary import PrivateFolder
from ddpperf.workers import channel
from ddpperf.workers.channel import Message
from ddpperf.workers.interpreter import Side
from ddpperf.workers.rank_process import RankProcess, end_ranks, wait_for_stacks

MOST_REPORT_LETTERS = 2**18  # of a rank's stacks: JSON writes a letter with up to 12 bytes


@dataclass(frozen=True, kw_only=True)
class Running:
    """A rank of this node. exit: a pidfd, which is readable once the rank's process has ended."""

    token: str
    set_name: str
    process: RankProcess
    exit: int


class AgentRanks:
    """Starts and ends the ranks of this node.

    address: of the controller, to which each rank gets a connection. interface: the network interface
    that gloo and NCCL use here. data_path: where this node has the images, or None.
    """

    def __init__(self, address: tuple[str, int], key: bytes, interface: str) -> None:
        self.data_path: Path | None = None
        self._address, self._key, self._interface = address, key, interface
        self._running: dict[str, Running] = {}  # by their tokens
        self._folders: dict[str, PrivateFolder] = {}  # of each process set

    def start(self, token: str, node: int, message: Message) -> Message | None:
        """Start a rank with a connection of its own to the controller.

        Returns None, or the message that says why the rank could not be started.
        """
        name, rank = str(message["set"]), int(message["rank"])
        try:
            if name not in self._folders:
                self._folders[name] = PrivateFolder()
            private = self._folders[name].path
            folder = private / name
            folder.mkdir(exist_ok=True)
            log = None
            if message["log_folder"] is not None:
                log = Path(message["log_folder"]) / f"{name}-rank{rank}.log"
                log.parent.mkdir(parents=True, exist_ok=True)
            with connect(self._address, self._key) as connection:
                channel.send(connection, {"rank": token, "node": node})
                with socket.socket(fileno=os.dup(connection.fileno())) as theirs:
                    channel.limit_pauses(theirs, 0)  # a rank may wait for its next command for hours
                    process = RankProcess(
                        rank,
                        theirs,
                        node_rank=int(message["node_rank"]),
                        device=str(message["device"]),
                        side=self._side(message["side"]),
                        log=log,
                        folder=folder,
                        interface=self._interface,
                    )
            try:
                exit = os.pidfd_open(process.pid)
            except OSError:  # no descriptor is free, or Linux is older than 5.3
                end_ranks([process])
                raise
            self._running[token] = Running(token=token, set_name=name, process=process, exit=exit)
        except (OSError, Refused, AuthenticationError) as error:
            self._remove_if_empty(name)
            return _ended(token, f"could not be started: {error}")
        return None

    def _side(self, described: Message) -> Side:
        root, environment = described["root"], dict(described["environment"])
        if DATA_VARIABLE in environment and self.data_path is not None:
            environment[DATA_VARIABLE] = str(self.data_path)
        return Side(
            name=str(described["name"]),
            python=described["python"] or sys.executable,
            root=None if root is None else Path(root),
            environment=environment,
        )

    def exits(self) -> dict[int, Running]:
        """Return the running ranks by the file descriptors that are readable after their ends."""
        return {running.exit: running for running in self._running.values()}

    def kill(self, token: str) -> None:
        """Kill a rank and what it started, unless it has ended."""
        if token in self._running:
            self._running[token].process.kill()

    def stacks(self, token: str) -> str:
        """Return the stacks of all threads of a rank, or "" if it has ended. Raises OSError, too."""
        running = self._running.get(token)
        if running is None:
            return ""
        running.process.ask_for_stacks()
        wait_for_stacks([running.process])
        return _ends_of(running.process.stacks())

    def end_of(self, running: Running) -> Message:
        """Return the message that says how a rank ended, and end what the rank had started."""
        failure = running.process.death()
        self._end([running])
        return _ended(running.token, failure.what, shortened(failure.detail))

    def _end(self, ended: Sequence[Running]) -> None:
        """Kill ranks and what they started, and remove the folders of process sets without ranks."""
        for running in ended:
            del self._running[running.token]
            os.close(running.exit)
        end_ranks([running.process for running in ended])
        for name in {running.set_name for running in ended}:
            self._remove_if_empty(name)

    def _remove_if_empty(self, set_name: str) -> None:
        if set_name in self._folders and set_name not in {one.set_name for one in self._running.values()}:
            self._folders.pop(set_name).remove()

    def end_all(self) -> None:
        """Kill all ranks and what they started, and remove their folders."""
        self._end([*self._running.values()])
        for folder in self._folders.values():
            folder.remove()


def _ends_of(report: str) -> str:
    """Return the beginning and the end of a report that is too long for a message."""
    half = MOST_REPORT_LETTERS // 2
    if (dropped := len(report) - 2 * half) <= 0:
        return report
    return f"{report[:half]}\n(ddpperf dropped {dropped} letters here)\n{report[-half:]}"


def _ended(token: str, what: str, detail: str = "") -> Message:
    return {"rank": token, "ended": True, "what": what, "detail": detail}
