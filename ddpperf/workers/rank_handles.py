"""The controller's handles of ranks on this machine: how they start, what they print, how they end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from ddpperf.io.private_folders import remove_tensors
from ddpperf.machine.child_process import describe_status, kill_group, members_of, wait_for_end, wait_for_exit
from ddpperf.workers.channel import Message, limit_pauses, send
from ddpperf.workers.failures import Cause, RankFailure, Report, explain_death
from ddpperf.workers.rank_output import RankOutput

EXIT_SECONDS = 5
LATE_SECONDS = 0.25  # until a process that has closed its connection has ended


class RankHandle:
    """A rank: the connection to it, what it prints, and the process that the controller started for it.

    where: " on node b" for a rank that a launcher has started (launcher.py). pid: the rank's process
    id, or None if it runs on another machine.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        output: RankOutput,
        process: subprocess.Popen[bytes],
        *,
        where: str = "",
    ) -> None:
        self.rank, self.connection, self.output, self.process = rank, connection, output, process
        self.where = where
        self.pid: int | None = process.pid
        self._commanded = 0  # how much the rank had printed before its last command

    def is_dead(self) -> bool:
        return wait_for_exit(self.process) is not None

    def command(self, message: Message) -> None:
        """Send a command. If the rank is dead, the error is ignored; `is_dead` reports the death later."""
        self._commanded = self.output.printed
        with contextlib.suppress(OSError):
            send(self.connection, message)

    def failure(self, cause: Cause, what: str, detail: str = "", *, limit: bool = False) -> RankFailure:
        return RankFailure(
            rank=self.rank, cause=cause, what=what, detail=detail, where=self.where, limit=limit
        )

    def death(self, error: int = 0) -> RankFailure:
        """Return how the rank's process ended, with the last lines that it and its launcher printed.

        error: the number of the error that the connection had, or 0.
        """
        what, words = self._ending(error)
        return self.failure(Cause.DIED, what, explain_death(self.rank, self.output.end(), words))

    def _ending(self, error: int) -> tuple[str, list[str]]:
        """Return how the rank's process ended, and what its launcher said of it."""
        what = describe_status(wait_for_exit(self.process, LATE_SECONDS))
        kill_group(self.process)  # what the rank has started would keep its output open
        return what, []

    def report(self) -> Report:
        """Return the state of the rank's process, and what it has printed since its last command.

        After the deadline of a command, a rank prints its stacks and its collectives.
        """
        state = "on another machine"
        if self.pid is not None:
            try:
                state = psutil.Process(self.pid).status()  # such as "sleeping" or "stopped"
            except psutil.Error:
                state = "ended"
        printed = self.output.since(self._commanded)
        return Report(rank=f"{self.rank}{self.where}", state=state, printed=printed)

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the rank's process has ended."""
        wait_for_exit(self.process, seconds)

    def kill(self) -> None:
        """Kill the rank's process and all processes that it started, without waiting."""
        kill_group(self.process)

    def close(self) -> None:
        """Reap a killed process, whose id is then free, and close the connection to the rank."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=EXIT_SECONDS)
        self.output.close()
        self.connection.close()


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
    return RankHandle(rank, connection, read, process)


def end_ranks(ranks: Sequence[RankHandle]) -> None:
    """Kill ranks and what they started, wait for their ends, and remove their shared memory.

    May be called again.
    """
    ranks = [rank for rank in ranks if not rank.connection.closed]  # the id of an ended one may be reused
    groups = {rank.pid for rank in ranks if rank.pid is not None}
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
