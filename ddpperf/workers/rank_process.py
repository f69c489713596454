"""Start, watch and end the processes of ranks on this node."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

from ddpperf.errors import short
from ddpperf.machine.child_process import describe_exit, kill_group, members_of, wait_for_end, wait_for_exit
from ddpperf.temporary import remove_tensors
from ddpperf.workers.channel import limit_pauses
from ddpperf.workers.failures import Cause, RankFailure
from ddpperf.workers.handshake import shut_down
from ddpperf.workers.hangs import COLLECTIVES, STATE
from ddpperf.workers.interpreter import LOOPBACK, Side, rank_environment
from ddpperf.workers.launcher import Joined, Launch
from ddpperf.workers.node_facts import machine_id
from ddpperf.workers.rank_output import RankOutput
from ddpperf.workers.worker import STACKS_SIGNAL

STACKS_SECONDS = 0.5
EXIT_SECONDS = 5
LOG_TAIL_LINES = 20


class AnyRank(Protocol):
    """A rank of this node or of another one, whose process can be watched and ended."""

    rank: int

    def is_dead(self) -> bool: ...
    def death(self) -> RankFailure: ...
    def wait(self, seconds: float) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
    def ask_for_stacks(self) -> None: ...
    def stacks(self) -> str: ...


class RankProcess:
    """The process of one rank of this node.

    The constructor raises OSError if the process cannot be started, or if this node lacks the side's
    source tree: the rank would then import the installed code instead. channel: the rank's end of
    its connection to the controller process, which the rank reads as standard input. node_rank: the
    rank's place among the ranks of this node, which is the index of its GPU. log: the file for
    everything that the process prints, or None. folder: where its temporary files go, within the
    private folder of the process set. interface: the network interface that gloo and NCCL use.
    """

    def __init__(
        self,
        rank: int,
        channel: socket.socket,
        *,
        node_rank: int,
        device: str,
        side: Side,
        log: Path | None,
        folder: Path,
        interface: str = LOOPBACK,
    ) -> None:
        if side.root is not None and not side.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such source tree on this node", str(side.root))
        self.rank = rank
        reader, writer = os.pipe()
        try:
            self.output = RankOutput(reader, log)
        except BaseException:
            os.close(writer)
            raise
        variables = {"RANK": str(rank), "LOCAL_RANK": str(node_rank), "TMPDIR": str(folder)}
        channel.setblocking(True)  # whatever socket.setdefaulttimeout says: both ends wait for messages
        try:
            with open(writer, "wb", buffering=0) as output:
                self.process = subprocess.Popen(
                    side.command("rank", str(folder.parent), str(rank)),
                    stdin=channel.fileno(),  # a wrapper of an interpreter passes it on
                    stdout=output,
                    stderr=output,
                    env=rank_environment(device, interface) | side.variables() | variables,
                    process_group=0,  # Ctrl-C reaches the controller alone, killpg the rank's children too
                )
        except BaseException:
            self.output.close()
            raise
        self.pid = self.process.pid
        self._stacks_begin = 0
        self._state = ""

    def is_dead(self) -> bool:
        return wait_for_exit(self.process) is not None

    def death(self) -> RankFailure:
        """Return how the rank's process ended, with the last lines that it printed.

        Kills what the rank had started, which would keep the pipe of its output open.
        """
        what = describe_exit(self.process)
        self.kill()
        lines = self.output.end().splitlines()[-LOG_TAIL_LINES:]
        detail = "\n".join([f"the end of rank {self.rank}'s output:", *lines] if lines else [])
        return RankFailure(rank=self.rank, cause=Cause.DIED, what=what, detail=detail)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the rank's process has ended."""
        wait_for_exit(self.process, seconds)

    def kill(self) -> None:
        """Kill the rank's process and all processes that it started, without waiting."""
        kill_group(self.process)

    def ask_for_stacks(self) -> None:
        """Let the rank print the stacks of all its threads and its collectives."""
        self._stacks_begin = self.output.printed
        self._state = _state(self.pid)
        if not self.is_dead():  # Popen.send_signal would reap it
            os.kill(self.pid, STACKS_SIGNAL)

    def stacks(self) -> str:
        """Return the state of the rank's process, and what it has printed since `ask_for_stacks`."""
        return f"{STATE}{self._state}\n{self.output.since(self._stacks_begin)}"

    def close(self) -> None:
        """Reap the killed process, whose id is then free, and stop reading what it prints."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=EXIT_SECONDS)
        self.output.close()


class LocalRank(RankProcess):
    """The process of one rank of the controller's node, and the controller's end of its connection."""

    where = ""

    def __init__(self, rank: int, **arguments: Any) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(True)
        limit_pauses(ours)
        with ours, theirs:
            super().__init__(rank, theirs, node_rank=rank, **arguments)
            self.connection = Connection(ours.detach())

    def connect(self) -> None:
        """Do nothing: a rank of this node is connected from its start."""

    def close(self) -> None:
        """Reap the killed process, close the connection to it, and stop reading what it prints."""
        super().close()
        self.connection.close()


class LaunchedRank:
    """A rank that a launcher has started, on any node.

    where: " on node b". pid: its process id if it runs on this machine, else None.
    """

    def __init__(self, rank: int, joined: Joined, launch: Launch, log: Path | None) -> None:
        self.rank = rank
        self.where = f" on node {short(str(joined.hello['host']))}"
        self.pid = joined.hello["pid"] if joined.hello["machine"] == machine_id() else None
        self.connection, self._launch = joined.commands, launch
        self.output = RankOutput(os.dup(joined.output.fileno()), log)
        self._output = joined.output
        self._events = select.poll()
        self._events.register(self.connection.fileno(), select.POLLRDHUP)

    def connect(self) -> None:
        """Do nothing: the rank has joined."""

    def is_dead(self) -> bool:
        return bool(self._events.poll(0)) or self._launch.has_ended(self.rank)

    def death(self) -> RankFailure:
        """Return how the rank ended: the end of what it printed, and what its launcher says."""
        first_to_end = not self._events.poll(0)
        words = self._launch.words(self.rank)
        what = self._launch.describe_rank(self.rank)
        if first_to_end:
            what = f"was lost: {self._launch.name} {self._launch.describe(self.rank)}"
        lines = self.output.end().splitlines()[-LOG_TAIL_LINES:]
        detail = [f"the end of rank {self.rank}'s output:", *lines] if lines else []
        detail += [f"{self._launch.name} printed:", *words] if words else []
        return RankFailure(
            rank=self.rank, cause=Cause.DIED, what=what, detail="\n".join(detail), where=self.where
        )

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the rank and what it started have ended."""
        self.output.wait(seconds)

    def kill(self) -> None:
        """End the rank's connections. The rank then ends all that it started, and itself."""
        shut_down(self.connection)
        shut_down(self._output)

    def ask_for_stacks(self) -> None:
        pass

    def stacks(self) -> str:
        return ""

    def close(self) -> None:
        """Close the connections to the rank, which has ended."""
        self.output.close()
        self._output.close()
        self.connection.close()


def end_ranks(ranks: Sequence[AnyRank]) -> None:
    """Kill ranks and what they started, wait for their ends, and remove their shared memory.

    Some ranks may be on other nodes. May be called again.
    """
    ours = (rank.process for rank in ranks if isinstance(rank, RankProcess))
    groups = {process.pid for process in ours if process.returncode is None}  # a reaped id may be reused
    started = members_of(groups)
    for rank in ranks:
        rank.kill()
    end = time.monotonic() + EXIT_SECONDS
    for rank in ranks:
        rank.wait(max(0.0, end - time.monotonic()))
    wait_for_end(started)
    for rank in ranks:
        rank.close()
    remove_tensors({*started, *groups})


def wait_for_stacks(ranks: Sequence[AnyRank]) -> None:
    """Wait until each rank has printed its stacks and collectives, at most STACKS_SECONDS."""
    end = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < end and not all(COLLECTIVES in rank.stacks() for rank in ranks):
        time.sleep(0.02)


def _state(process: int) -> str:
    """Return the state of a process in words, such as "sleeping" or "stopped"."""
    try:
        state = str(psutil.Process(process).status())
    except psutil.Error:
        return "ended"
    return {"disk-sleep": "uninterruptible", "zombie": "ended", "tracing-stop": "stopped"}.get(state, state)
