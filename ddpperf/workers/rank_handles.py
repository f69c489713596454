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
from ddpperf.workers.channel import Message, limit_pauses, send, socket_of
from ddpperf.workers.failures import Cause, RankFailure
from ddpperf.workers.handshake import machine_id
from ddpperf.workers.hangs import STATE
from ddpperf.workers.launcher import Launch
from ddpperf.workers.rank_output import RankOutput

EXIT_SECONDS = 5
LOG_TAIL_LINES = 20
NETWORK_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class RankHandle:
    """A rank: the connection to it, and what it prints.

    source: the rank's process if this process has started it, or else the launch that has started it, on
    any node. A launched rank ends when its connection ends. where: " on node b" for a launched rank.
    pid: the rank's process id, or None if it runs on another machine. folder: the private folder of a
    launched rank, which is removed in the end if the rank runs on this machine.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        output: RankOutput,
        source: subprocess.Popen[bytes] | Launch,
        *,
        pid: int | None,
        where: str = "",
        folder: Path | None = None,
    ) -> None:
        self.rank, self.connection, self.output, self.source = rank, connection, output, source
        self.pid, self.where, self._folder = pid, where, folder
        self._hangup = select.poll()
        self._hangup.register(connection.fileno(), select.POLLRDHUP)
        self._commanded = 0  # how much the rank had printed before its last command

    def is_dead(self) -> bool:
        """Return whether the rank's process has ended."""
        if isinstance(self.source, Launch):
            return bool(self._hangup.poll(0)) or bool(self.source.ending(self.rank))
        return wait_for_exit(self.source) is not None

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
        """Return how the rank's process ended, with the last lines that it and its launcher printed.

        error: the number of the error that the connection had, or 0.
        """
        source, words = self.source, []
        if isinstance(source, Launch):
            with socket_of(self.connection) as connected:
                error = error or connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error in NETWORK_LOST:
                what = f"was lost: its node or the network does not answer ({os.strerror(error)})"
            else:
                lines = source.words(self.rank)
                words = [f"{source.name} printed:", *lines] if lines else []
                ending = source.ending(self.rank)
                what = f"ended, and {source.name} {ending}" if ending else "ended"
        else:
            what = describe_exit(source)
            kill_group(source)  # what the rank has started would keep its output open
        lines = self.output.end().splitlines()[-LOG_TAIL_LINES:]
        printed = [f"the end of rank {self.rank}'s output:", *lines] if lines else []
        return self.failure(Cause.DIED, what, "\n".join(printed + words))

    def report(self) -> str:
        """Return the state of the rank's process, and what it has printed since its last command.

        After the deadline of a command, a rank prints its stacks and its collectives.
        """
        state = "on another machine"
        if self.pid is not None:
            try:
                state = psutil.Process(self.pid).status()  # such as "sleeping" or "stopped"
            except psutil.Error:
                state = "ended"
        return f"{STATE}{state}\n{self.output.since(self._commanded)}"

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the rank's process has ended."""
        if isinstance(self.source, Launch):
            self.output.wait(seconds)
        else:
            wait_for_exit(self.source, seconds)

    def kill(self) -> None:
        """Kill the rank's process and all processes that it started, without waiting."""
        if not isinstance(self.source, Launch):
            kill_group(self.source)
        elif not self.connection.closed:
            with (
                contextlib.suppress(OSError),  # the connection has ended
                socket_of(self.connection) as connected,
            ):
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Reap a killed process, whose id is then free, and close the connection to the rank."""
        if not isinstance(self.source, Launch):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.source.wait(timeout=EXIT_SECONDS)
        self.output.close()
        self.connection.close()
        if self._folder is not None and self.pid is not None:
            remove_folder(self._folder)


def start_rank(
    rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path | None
) -> RankHandle:
    """Start a rank on this machine, or raise OSError if its process cannot be started.

    environment: its variables. log: the file for everything that the process prints, or None.
    """
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(True)  # whatever socket.setdefaulttimeout says: both wait for messages
    reader, writer = os.pipe()
    with ours, theirs, open(writer, "wb", buffering=0) as output:
        read = RankOutput(reader, log)
        try:
            process = subprocess.Popen(
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
        connection = Connection(ours.detach())
    limit_pauses(connection)
    return RankHandle(rank, connection, read, process, pid=process.pid)


def launched_rank(
    rank: int, launch: Launch, hello: Message, connections: Sequence[Connection], log: Path | None
) -> RankHandle:
    """Return the handle of a rank that has joined. connections: for its commands and for its output."""
    commands, output = connections
    with output:
        read = RankOutput(os.dup(output.fileno()), log)
    return RankHandle(
        rank,
        commands,
        read,
        launch,
        pid=hello["pid"] if hello["machine"] == machine_id() else None,
        where=f" on node {short(str(hello['host']))}",
        folder=Path(hello["temporary"]),
    )


def end_ranks(ranks: Sequence[RankHandle]) -> None:
    """Kill ranks and what they started, wait for their ends, and remove their shared memory.

    May be called again.
    """
    processes = [rank.source for rank in ranks if not isinstance(rank.source, Launch)]
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
