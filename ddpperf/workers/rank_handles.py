"""The controller's handles of ranks, which it starts itself or which a launcher starts."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from ddpperf.errors import short
from ddpperf.io.private_folders import remove_folder, remove_tensors
from ddpperf.machine.child_process import describe_exit, kill_group, members_of, wait_for_end, wait_for_exit
from ddpperf.workers.channel import Message, limit_pauses, send
from ddpperf.workers.failures import Cause, RankFailure
from ddpperf.workers.handshake import shut_down
from ddpperf.workers.hangs import COLLECTIVES, STATE
from ddpperf.workers.launcher import Joined, Launch
from ddpperf.workers.node_facts import machine_id
from ddpperf.workers.rank_output import RankOutput

STACKS_SECONDS = 0.5
EXIT_SECONDS = 5
LOG_TAIL_LINES = 20
NETWORK_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class AnyRank:
    """A rank: the connection to it, and what it prints.

    where: " on node b" if a launcher has started the rank, or "". pid: its process id, or None if it
    runs on another machine.
    """

    def __init__(
        self, rank: int, connection: Connection, output: RankOutput, *, pid: int | None, where: str = ""
    ) -> None:
        self.rank, self.connection, self.output = rank, connection, output
        self.pid, self.where = pid, where
        self._commanded = 0  # how much the rank had printed before its last command

    def is_dead(self) -> bool:
        """Return whether the rank's process has ended."""
        raise NotImplementedError

    def how_it_ended(self, error: int) -> tuple[str, list[str]]:
        """Return how the rank's process ended, as a phrase, and further lines on it.

        error: the number of the error that the connection had, or 0. What the rank had started is then
        killed, as it would keep the rank's output open.
        """
        raise NotImplementedError

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the rank's process has ended."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the rank's process and all processes that it started, without waiting."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection to a rank that was killed, and stop reading what it prints."""
        self.output.close()
        self.connection.close()

    def command(self, message: Message) -> None:
        """Send a command. If the rank is dead, the error is ignored; `is_dead` reports the death later."""
        self._commanded = self.output.printed
        with contextlib.suppress(OSError):
            send(self.connection, message)

    def failure(self, cause: Cause, what: str, detail: str = "", *, limit: bool = False) -> RankFailure:
        """Return a failure of this rank."""
        return RankFailure(
            rank=self.rank, cause=cause, what=what, detail=detail, where=self.where, limit=limit
        )

    def death(self, error: int = 0) -> RankFailure:
        """Return how the rank's process ended, with the last lines that it printed."""
        what, more = self.how_it_ended(error)
        lines = self.output.end().splitlines()[-LOG_TAIL_LINES:]
        detail = [f"the end of rank {self.rank}'s output:", *lines] if lines else []
        return self.failure(Cause.DIED, what, "\n".join(detail + more))

    def report(self) -> str:
        """Return the state of the rank's process, and what it has printed since its last command.

        After the deadline of a command, a rank prints its stacks and its collectives.
        """
        state = _state(self.pid) if self.pid is not None else "not on this machine"
        return f"{STATE}{state}\n{self.output.since(self._commanded)}"


class LocalRank(AnyRank):
    """A rank that the controller starts on this machine.

    The constructor raises OSError if the process cannot be started. command: what runs the rank.
    environment: its variables. log: the file for everything that the process prints, or None.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path | None
    ) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(True)  # whatever socket.setdefaulttimeout says: both wait for messages
        reader, writer = os.pipe()
        with ours, theirs, open(writer, "wb", buffering=0) as output:
            read = RankOutput(reader, log)
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),  # a wrapper of an interpreter passes it on
                    stdout=output,
                    stderr=output,
                    env=environment,
                    process_group=0,  # Ctrl-C reaches the controller alone, killpg the rank's children too
                )
            except BaseException:
                output.close()
                read.close()
                raise
            super().__init__(rank, Connection(ours.detach()), read, pid=self.process.pid)
            limit_pauses(self.connection)

    def is_dead(self) -> bool:
        return wait_for_exit(self.process) is not None

    def how_it_ended(self, error: int) -> tuple[str, list[str]]:
        what = describe_exit(self.process)
        self.kill()
        return what, []

    def wait(self, seconds: float) -> None:
        wait_for_exit(self.process, seconds)

    def kill(self) -> None:
        kill_group(self.process)

    def close(self) -> None:
        """Reap the killed process, whose id is then free, and close the connection to it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=EXIT_SECONDS)
        super().close()


class LaunchedRank(AnyRank):
    """A rank that a launcher has started, on any node. It ends when its connections end."""

    def __init__(self, rank: int, joined: Joined, launch: Launch, log: Path | None) -> None:
        assert joined.output is not None
        here = joined.hello["machine"] == machine_id()
        super().__init__(
            rank,
            joined.commands,
            RankOutput(os.dup(joined.output.fileno()), log),
            pid=joined.hello["pid"] if here else None,
            where=f" on node {short(str(joined.hello['host']))}",
        )
        self._launch, self._output = launch, joined.output
        self._temporary = Path(joined.hello["temporary"])
        self._ends = select.poll()
        self._ends.register(self.connection.fileno(), select.POLLRDHUP)

    def is_dead(self) -> bool:
        return bool(self._ends.poll(0)) or bool(self._launch.ending(self.rank))

    def how_it_ended(self, error: int) -> tuple[str, list[str]]:
        with socket.socket(fileno=os.dup(self.connection.fileno())) as connected:
            error = error or connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error in NETWORK_LOST:
            return f"was lost: its node or the network does not answer ({os.strerror(error)})", []
        launch, was_connected = self._launch, not self._ends.poll(0)
        words = launch.words(self.rank)
        what = launch.how_rank_ended(self.rank)
        if was_connected:
            what = f"was lost: {launch.name} {launch.ending(self.rank) or 'runs'}"
        return what, [f"{launch.name} printed:", *words] if words else []

    def wait(self, seconds: float) -> None:
        self.output.wait(seconds)

    def kill(self) -> None:
        shut_down(self.connection)
        shut_down(self._output)

    def close(self) -> None:
        super().close()
        self._output.close()
        if self.pid is not None:  # a killed rank leaves its folder; on other nodes the next run removes it
            remove_folder(self._temporary)


def end_ranks(ranks: Sequence[AnyRank]) -> None:
    """Kill ranks and what they started, wait for their ends, and remove their shared memory.

    May be called again.
    """
    processes = [rank.process for rank in ranks if isinstance(rank, LocalRank)]
    groups = {process.pid for process in processes if process.returncode is None}  # an id may be reused
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
    while time.monotonic() < end and not all(COLLECTIVES in rank.report() for rank in ranks):
        time.sleep(0.02)


def _state(process: int) -> str:
    """Return the state of a process in words, such as "sleeping" or "stopped"."""
    try:
        state = str(psutil.Process(process).status())
    except psutil.Error:
        return "ended"
    return {"disk-sleep": "uninterruptible", "zombie": "ended", "tracing-stop": "stopped"}.get(state, state)
