"""One set of rank processes: started by exec, spoken to over their channels, and never left running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

import ddpperf
from ddpperf.workers import channel
from ddpperf.workers.channel import Message
from ddpperf.workers.failures import Cause, RankFailure, SetFailure, describe_exit

START_SECONDS = 120  # to import torch on a busy machine and to make a CUDA context
GATHER_SECONDS = 0.2  # after a first failure, for the failures that came before it or follow from it
STACKS_SECONDS = 0.5
EXIT_SECONDS = 5
GROUP_GRACE_SECONDS = 300  # a group outlives every deadline, so that the controller is the first to find a hang
LOG_TAIL_LINES = 20

# Runs the worker from this very package without putting its parent folder on the path of another interpreter, where
# it could hide that interpreter's own torch.
_BOOTSTRAP = """
import importlib.util, sys
package, path, rank = sys.argv[1:]
spec = importlib.util.spec_from_file_location("ddpperf", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["ddpperf"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from ddpperf.workers.worker import main
main(path, int(rank))
"""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What runs the ranks of a set: an interpreter that has torch, and variables for its environment."""

    name: str = "A"
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


class ProcessSet:
    """`size` ranks on one node. `spawn` returns at once, `wait_ready` when all ranks answer; both kill the set if they fail.

    folder: a private folder for the socket. log_folder: where each rank's output goes, one file a rank.
    deadline_seconds: how long a rank may take over one command.
    """

    def __init__(
        self, name: str, *, side: Side, size: int, device: str, folder: Path, log_folder: Path, deadline_seconds: float
    ) -> None:
        self.name = name
        self.side = side
        self.size = size
        self.device = device
        self.deadline_seconds = deadline_seconds
        self.environment: Message = {}
        self.alive = True
        self._folder = folder
        self._logs = [log_folder / f"{name}-rank{rank}.log" for rank in range(size)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: dict[int, Connection] = {}
        self._store_port = 0
        self._group_size = 0
        self._groups_made = 0

    # --- starting

    def spawn(self) -> None:
        self._listener = channel.Listener(self._folder / f"{self.name}.socket")
        try:
            for rank in range(self.size):
                self._processes.append(self._spawn_rank(rank))
        except OSError as error:
            self.kill()
            what = f"could not be started: {self.side.python}: {error.strerror}"
            failure = RankFailure(rank=len(self._processes), cause=Cause.DIED, what=what, detail="")
            raise self._failure("start", [failure]) from error
        except BaseException:
            self.kill()
            raise

    def _spawn_rank(self, rank: int) -> subprocess.Popen[bytes]:
        package = Path(ddpperf.__file__).parent
        command = [self.side.python, "-c", _BOOTSTRAP, str(package), str(self._listener.path), str(rank)]
        with open(self._logs[rank], "wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | _RANK_ENVIRONMENT | self._rank_variables(rank) | dict(self.side.environment),
                process_group=0,  # its own: Ctrl-C reaches the controller alone, and killpg reaches its children
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once; wait_ready says so
            process.stdin.write(self._listener.key.hex().encode() + b"\n")
            process.stdin.flush()
        return process

    def _rank_variables(self, rank: int) -> dict[str, str]:
        """Its rank, before a process group is made, and a temporary folder that goes with the pool."""
        return {"RANK": str(rank), "LOCAL_RANK": str(rank), "TMPDIR": str(self._folder)}

    def wait_ready(self) -> None:
        try:
            self._accept_all(time.monotonic() + START_SECONDS)
            answers = self.request("setup", deadline_seconds=START_SECONDS, device=self.device)
            self._store_port = answers[0]["port"]
            self.environment = answers[0]["environment"]
        except BaseException:
            self.kill()
            raise
        self._listener.close()

    def _accept_all(self, end: float) -> None:
        while len(self._connections) < self.size:
            missing = [rank for rank in range(self.size) if rank not in self._connections]
            dead = [rank for rank in missing if self._processes[rank].poll() is not None]
            if dead:
                raise self._failure("start", [self._death(rank) for rank in dead])
            if time.monotonic() > end:
                raise self._failure("start", self._hangs(missing, START_SECONDS))
            accepted = self._listener.accept(timeout_seconds=0.05)
            if accepted is not None:
                self._connections[channel.receive(accepted)["rank"]] = accepted

    def process_ids(self) -> list[int]:
        """The ranks' process ids, by rank."""
        return [process.pid for process in self._processes]

    # --- commands

    def request(
        self,
        command: str,
        *,
        ranks: Iterable[int] | None = None,
        deadline_seconds: float | None = None,
        **arguments: object,
    ) -> dict[int, Message]:
        """Send one command to `ranks` (default: all) and return their answers; raises SetFailure, the set then dead."""
        ranks = list(range(self.size) if ranks is None else ranks)
        try:
            for rank in ranks:
                with contextlib.suppress(OSError):  # a dead rank's connection then ends when read
                    channel.send(self._connections[rank], {"command": command, **arguments})
            return self._collect(command, ranks, deadline_seconds or self.deadline_seconds)
        except BaseException:
            self.kill()
            raise

    def _collect(self, command: str, ranks: list[int], deadline_seconds: float) -> dict[int, Message]:
        """Wait for all ranks at once: read in order, a raise in rank 1 would look like a hang of rank 0."""
        end = time.monotonic() + deadline_seconds
        waiting = {self._connections[rank]: rank for rank in ranks}
        answers: dict[int, Message] = {}
        dead: list[int] = []
        raised: list[RankFailure] = []
        while waiting and (remaining := end - time.monotonic()) > 0:
            # A short wait, then a look at the processes: a child that inherited a dead rank's connection keeps it open.
            ready = connection.wait(list(waiting), timeout=min(remaining, 0.1))
            ready += [c for c, rank in waiting.items() if c not in ready and self._processes[rank].poll() is not None]
            for ready_connection in ready:
                assert isinstance(ready_connection, Connection)
                rank = waiting.pop(ready_connection)
                try:
                    answer = channel.receive(ready_connection)
                except (EOFError, OSError):
                    dead.append(rank)
                else:
                    answers[rank] = answer
                    if "error" in answer:
                        raised.append(_raised(rank, answer["error"]))
                if dead or raised:
                    end = min(end, time.monotonic() + GATHER_SECONDS)
        if dead or raised:
            raise self._failure(command, [*map(self._death, dead), *raised])
        if waiting:
            raise self._failure(command, self._hangs(sorted(waiting.values()), deadline_seconds))
        return answers

    def join(self, world_size: int) -> float:
        """Make ranks 0..world_size-1 the default process group, if they are not; returns the seconds it took."""
        if self._group_size == world_size:
            return 0.0
        self.leave()
        self._groups_made += 1
        answers = self.request(
            "join",
            ranks=range(world_size),
            port=self._store_port,
            name=f"group{self._groups_made}",
            world_size=world_size,
            timeout_seconds=self.deadline_seconds + GROUP_GRACE_SECONDS,
        )
        self._group_size = world_size
        return max(float(answer["seconds"]) for answer in answers.values())

    def leave(self) -> None:
        """End the process group, if there is one."""
        if self._group_size:
            self.request("leave", ranks=range(self._group_size))
            self._group_size = 0

    # --- ending

    def close(self) -> None:
        """Let the ranks end by themselves, then make sure that they did."""
        if self.alive:
            with contextlib.suppress(SetFailure):
                self.leave()
                self.request("exit", deadline_seconds=EXIT_SECONDS)
                for process in self._processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=EXIT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End every rank and whatever it started, at once; harmless when repeated."""
        self.alive = False
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=EXIT_SECONDS)
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for open_connection in self._connections.values():
            open_connection.close()
        self._listener.close()

    # --- failures

    def _failure(self, command: str, failures: list[RankFailure]) -> SetFailure:
        return SetFailure(self.name, f"at {command}", failures)

    def _death(self, rank: int) -> RankFailure:
        what = describe_exit(self._processes[rank])
        return RankFailure(rank=rank, cause=Cause.DIED, what=what, detail=self._log_tail(rank))

    def _hangs(self, ranks: list[int], deadline_seconds: float) -> list[RankFailure]:
        """The failures of ranks that did not answer, with the stacks of every rank of the set."""
        stacks = self._stacks()
        what = f"did not answer within {deadline_seconds:g} s"
        hung = [RankFailure(rank=rank, cause=Cause.HUNG, what=what, detail=stacks.pop(rank)) for rank in ranks]
        first = hung[0]
        others = "\n".join(stacks.values())
        return [
            RankFailure(rank=first.rank, cause=first.cause, what=what, detail=f"{first.detail}\n{others}"),
            *hung[1:],
        ]

    def _stacks(self) -> dict[int, str]:
        """What every thread of every rank is doing, written by the ranks' own signal handler into their logs."""
        sizes = [log.stat().st_size for log in self._logs]
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < end and any(log.stat().st_size == size for log, size in zip(self._logs, sizes, strict=True)):
            time.sleep(0.02)
        time.sleep(0.1)  # a stack is written in many small pieces
        texts = [log.read_bytes()[size:].decode(errors="replace") for log, size in zip(self._logs, sizes, strict=True)]
        return {rank: f"stacks of rank {rank}:\n{text}" for rank, text in enumerate(texts)}

    def _log_tail(self, rank: int) -> str:
        lines = self._logs[rank].read_text(errors="replace").splitlines()
        if not lines:
            return ""
        return "\n".join([f"the end of rank {rank}'s output:", *lines[-LOG_TAIL_LINES:]])


_RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
}


def _raised(rank: int, error: Message) -> RankFailure:
    cause = Cause.RAISED_DISTRIBUTED if error["distributed"] else Cause.RAISED
    return RankFailure(rank=rank, cause=cause, what=f"raised {error['summary']}", detail=error["traceback"])
