"""Start, watch and end the process of one rank from the controller process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from ddpperf.machine.child_process import describe_exit, end_of
from ddpperf.workers.failures import Cause, RankFailure
from ddpperf.workers.interpreter import Side, rank_environment
from ddpperf.workers.worker import STACKS_SIGNAL

STACKS_SECONDS = 0.5
EXIT_SECONDS = 5
LOG_TAIL_LINES = 20


class RankProcess:
    """The process of one rank, which is connected to the controller process.

    The constructor raises OSError if the process cannot be started. log: the file for everything
    that the process prints. folder: where its temporary files go, within the private folder of the
    process set.
    """

    def __init__(self, rank: int, *, device: str, side: Side, log: Path, folder: Path) -> None:
        self.rank = rank
        self.log = log
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TMPDIR": str(folder)}
        ours, theirs = socket.socketpair()
        ours.setblocking(True)  # whatever socket.setdefaulttimeout says: both ends wait for messages
        theirs.setblocking(True)
        with ours, theirs, open(log, "wb") as output:
            self.process = subprocess.Popen(
                side.command("rank", str(folder.parent), str(rank)),
                stdin=theirs.fileno(),  # a wrapper of an interpreter passes it on
                stdout=output,
                stderr=output,
                env=rank_environment(device) | side.variables() | variables,
                process_group=0,  # Ctrl-C reaches the controller alone, killpg the rank's children too
            )
            self.connection = Connection(ours.detach())
        self.pid = self.process.pid

    def is_dead(self) -> bool:
        return self.process.poll() is not None

    def death(self) -> RankFailure:
        """Return how the rank's process ended, with the last lines that it printed."""
        what = describe_exit(self.process)
        lines = end_of(self.log).splitlines()[-LOG_TAIL_LINES:]
        detail = "\n".join([f"the end of rank {self.rank}'s output:", *lines] if lines else [])
        return RankFailure(rank=self.rank, cause=Cause.DIED, what=what, detail=detail)

    def wait(self) -> None:
        """Wait at most EXIT_SECONDS until the rank's process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=EXIT_SECONDS)

    def kill(self) -> None:
        """Kill the rank's process and all processes that it started, without waiting."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def stacks_of(ranks: Sequence[RankProcess]) -> list[str]:
    """Return the stacks of all threads of each rank, which the ranks print into their logs."""
    begins = {rank: rank.log.stat().st_size for rank in ranks}
    for rank in ranks:
        rank.process.send_signal(STACKS_SIGNAL)
    end = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < end and not all(end_of(rank.log, begin) for rank, begin in begins.items()):
        time.sleep(0.02)
    time.sleep(0.1)  # a stack is written in many small pieces
    return [f"stacks of rank {rank.rank}:\n{end_of(rank.log, begin)}" for rank, begin in begins.items()]
