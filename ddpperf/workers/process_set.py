"""A process set: the rank processes of one process group, which end together."""

from __future__ import annotations

import contextlib
import errno
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

from ddpperf.errors import short
from ddpperf.io.private_folders import PrivateFolder
from ddpperf.specs.collective import UNTRACED_CALLS
from ddpperf.specs.spec import MOST_RANKS
from ddpperf.workers.channel import PROTOCOL, Message, SlowMessage, receive, socket_of
from ddpperf.workers.failures import COLLECTIVE, FREE_SPACE, Cause, RankFailure, SetFailure, explain_hang
from ddpperf.workers.interpreter import Side, rank_environment
from ddpperf.workers.launcher import Launch, Launcher
from ddpperf.workers.rank_handles import EXIT_SECONDS, RankHandle, end_ranks, start_rank
from ddpperf.workers.worker import DEADLINE_VARIABLE

START_SECONDS = 120  # to import torch on a busy machine and to make a CUDA context
STACKS_SECONDS = 0.5  # from the deadline of a command until all ranks have printed their stacks
GATHER_SECONDS = 0.2  # how long to wait for more failures after the first one
GROUP_GRACE_SECONDS = 300  # process groups time out later than commands: the controller reports a hang first
MOST_SUMMARY_LETTERS = 200  # of an error that a rank reports

Progress = Callable[[float], None] | None  # called with the fraction of a command that is done
Ranks = Iterable[int] | None  # None means all ranks
Answers = dict[int, Message]  # by rank


@dataclass(frozen=True, kw_only=True)
class SetOptions:
    """The options that all process sets of a pool have in common.

    size: the number of ranks. rounds: how often each spec is timed. deadline_seconds: how long a
    rank may take for a command, or be silent in a command that reports progress. log_folder: for the
    output of the ranks, one file for each; None to keep no file. hang_folder: for the stacks of hanging
    ranks, unless there is a log folder. cores: the CPU cores that each rank is pinned to. all_cores: those
    of a script; the controller's by default. time_only: a
    step that uses one device is then measured on the first device only, not on all devices in turn, and
    no kernels are listed. calls_traced: whether the kernel of a collective call is timed, too.
    launcher: what starts the ranks; None to start them on this machine.
    """

    size: int
    device: str
    rounds: int
    deadline_seconds: float
    log_folder: Path | None = None
    hang_folder: Path = Path(".ddpperf/hangs")
    cores: Sequence[Sequence[int]] | None = None
    all_cores: Sequence[int] = ()
    time_only: bool = False
    calls_traced: bool = True
    launcher: Launcher | None = None

    @property
    def devices_in_turn(self) -> int:
        """The number of devices on which a step that uses one device is measured, in turn."""
        return 1 if self.time_only else self.size


class ProcessSet:
    """The ranks of one process set, and the commands that the controller process sends to them.

    If one rank fails, all ranks are killed. After any other exception, the caller kills them. `spawn`
    starts the ranks and `wait_ready` waits until all have their devices, so that several process sets
    start side by side. environment: the versions of Python and torch in rank 0, once they are ready.
    fewest_mapped: the smallest world size that has mapped GPU memory, or MOST_RANKS.
    """

    def __init__(self, name: str, side: Side, options: SetOptions) -> None:
        self.name = name
        self.side = side
        self.options = options
        self.ranks: list[RankHandle] = []
        self.alive = True
        self.environment: Message = {}
        self.fewest_mapped = MOST_RANKS
        self._folder = PrivateFolder()  # for temporary files
        self._launch: Launch | None = None
        self._network: Message = {}  # where ranks on several nodes find each other
        self._group_size = 0
        self._pending: tuple[str, list[RankHandle]] = ("", [])  # the last command, and to whom

    # --- starting

    def spawn(self) -> None:
        options, side = self.options, self.side
        variables = {DEADLINE_VARIABLE: f"{options.deadline_seconds:g}"}
        variables |= {} if options.calls_traced else {UNTRACED_CALLS: "1"}
        if options.launcher is not None:
            self._launch = Launch(options.launcher, self.name, side, options.size, variables)
            return
        try:
            if side.root is not None and not side.root.is_dir():  # the installed code would run
                raise FileNotFoundError(errno.ENOENT, "no such source tree", str(side.root))
            (folder := self._folder.path / self.name).mkdir()
            variables |= rank_environment(options.device) | side.variables() | {"TMPDIR": str(folder)}
            for rank in range(options.size):
                of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = side.command("rank", str(self._folder.path), str(rank))
                self.ranks.append(start_rank(rank, command, variables | of_rank, self._log(rank)))
        except OSError as error:
            what = f"could not be started: {error.filename or side.python}: {error.strerror}"
            failure = RankFailure(rank=len(self.ranks), cause=Cause.DIED, what=what)
            raise self._failure("start", [failure]) from error
        self.ask("setup", device=options.device, cores=options.cores)

    def wait_ready(self) -> None:
        """Wait until all ranks of a process set have prepared their devices."""
        if self._launch is not None:
            self.ranks = self._launch.join(self._log)
            with socket_of(self.ranks[0].connection) as connected:
                self._network = {"address": connected.getpeername()[0]}
            self.ask("setup", device=self.options.device, cores=None, **self._network)
        answer = self.answers(deadline_seconds=max(START_SECONDS, self.options.deadline_seconds))[0]
        if PROTOCOL not in answer:
            what = "runs an older ddpperf, which cannot be compared; save a new baseline, or name newer code"
            raise self._failure("setup", [RankFailure(rank=0, cause=Cause.DIED, what=what)])
        self.environment = answer["environment"]
        self._network["port"] = answer["port"]

    def _log(self, rank: int) -> Path | None:
        folder = self.options.log_folder
        return folder and folder / f"{self.name}-rank{rank}.log"

    # --- commands

    def request(
        self, command: str, *, ranks: Ranks = None, progress: Progress = None, **arguments: object
    ) -> Answers:
        """Send a command to some or all ranks and return their answers, or raise SetFailure."""
        self.ask(command, ranks=ranks, **arguments)
        return self.answers(progress)

    def ask(self, command: str, *, ranks: Ranks = None, **arguments: object) -> None:
        """Send a command to some or all ranks. Call `answers` before the next command."""
        asked = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        self._pending = command, asked
        for rank in asked:
            rank.command({"command": command, **arguments})

    def answers(self, progress: Progress = None, deadline_seconds: float | None = None) -> Answers:
        """Return the ranks' answers to the last command, or raise SetFailure if a rank fails."""
        # Not rank by rank: an error in rank 1 would look like a hang of rank 0.
        command, asked = self._pending
        deadline_seconds = deadline_seconds or self.options.deadline_seconds
        end = time.monotonic() + deadline_seconds
        waiting = {rank.connection: rank for rank in asked}
        answers: Answers = {}
        failures: list[RankFailure] = []  # in the order in which they are noticed
        while waiting and (remaining := end - time.monotonic()) > 0:
            ready = connection.wait(list(waiting), timeout=min(remaining, 0.1))
            # Check the processes too: a child may keep a dead rank's connection open.
            dead = [other for other, rank in waiting.items() if other not in ready and rank.is_dead()]
            for connected in [*ready, *dead]:
                assert isinstance(connected, Connection)
                answer = _answer_of(waiting[connected])
                if isinstance(answer, dict) and "progress" in answer:
                    end = end if failures else time.monotonic() + deadline_seconds
                    if progress is not None:
                        progress(answer["progress"])
                    continue
                rank = waiting.pop(connected)
                if isinstance(answer, RankFailure):
                    failures.append(answer)
                else:
                    answers[rank.rank] = answer
            if failures:
                end = min(end, time.monotonic() + GATHER_SECONDS)
        if failures:
            raise self._failure(command, failures)
        if waiting:
            raise self._failure(command, self._hangs([*waiting.values()], deadline_seconds))
        if unwritten := [rank for rank in asked if rank.output.problem]:
            what = f"printed lines that are lost, because {unwritten[0].output.problem}; {FREE_SPACE}"
            raise self._failure(command, [unwritten[0].failure(Cause.RAISED, what)])
        return answers

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the ranks on this machine, by rank."""
        return {rank.rank: rank.pid for rank in self.ranks if rank.pid is not None}

    def dead_ranks(self) -> list[RankHandle]:
        return [rank for rank in self.ranks if rank.is_dead()]

    def require_alive(self) -> None:
        """Raise SetFailure if the process of any rank has ended, even of an idle rank."""
        if dead := self.dead_ranks():
            raise self._failure("no command", [rank.death() for rank in dead])

    def join(self, world_size: int) -> bool:
        """Tell ranks 0 to world_size-1 to form a process group; return False if they have formed it."""
        if self._group_size == world_size:
            return False
        self.leave()
        self.ask(
            "join",
            ranks=range(world_size),
            name=f"group{uuid.uuid4().hex}",
            world_size=world_size,
            timeout_seconds=self.options.deadline_seconds + GROUP_GRACE_SECONDS,
            **self._network,
        )
        self._group_size = world_size
        return True

    def leave(self, unless: int = 0) -> None:
        """End torch's process group; do nothing without a group or if it has `unless` ranks."""
        if self._group_size not in (0, unless):
            self.request("leave", ranks=range(self._group_size))
            self._group_size = 0

    # --- ending

    def begin_to_close(self) -> None:
        """Tell all ranks to exit; do nothing if this was done before."""
        if self.alive and self._pending[0] != "exit":
            self.ask("exit")

    def close(self) -> None:
        """Wait at most EXIT_SECONDS until all ranks have exited, then kill the remaining ranks."""
        try:
            self.begin_to_close()
            if self.alive:
                end = time.monotonic() + EXIT_SECONDS
                with contextlib.suppress(SetFailure):
                    self.answers(deadline_seconds=EXIT_SECONDS)
                    for rank in self.ranks:
                        rank.wait(max(0.0, end - time.monotonic()))
        finally:  # also if it is interrupted
            self.kill()

    def kill(self) -> None:
        """Kill all ranks and what they started, and remove their files. May be called again."""
        self.alive = False
        end_ranks(self.ranks)
        if self._launch is not None:
            self._launch.end()
        self._folder.remove()

    # --- failures

    def _failure(self, command: str, failures: list[RankFailure]) -> SetFailure:
        """Kill all ranks, because some have failed, and return the exception for it."""
        self.kill()
        return SetFailure(self.name, f"at {command}", failures)

    def _hangs(self, ranks: Sequence[RankHandle], deadline_seconds: float) -> list[RankFailure]:
        """Explain what each rank does, and write all their stacks to a file."""
        end = time.monotonic() + STACKS_SECONDS
        reports = [rank.report() for rank in self.ranks]
        while time.monotonic() < end and not all(COLLECTIVE in report.printed for report in reports):
            time.sleep(0.02)
            reports = [rank.report() for rank in self.ranks]
        folder = self.options.log_folder or self.options.hang_folder
        details = {ranks[0]: explain_hang(reports, folder, self.name)}  # of all ranks
        what = f"did not answer within {deadline_seconds:g} s"
        return [rank.failure(Cause.HUNG, what, details.get(rank, "")) for rank in ranks]


def _answer_of(rank: RankHandle) -> Message | RankFailure:
    """Return a rank's answer, or its failure if it has ended or cannot answer."""
    try:
        if rank.is_dead() and not rank.connection.poll():
            return rank.death()  # a child of a dead rank may keep the connection open
        answer = receive(rank.connection)
    except SlowMessage as slow:
        return rank.failure(Cause.HUNG, str(slow))
    except EOFError:
        return rank.death()
    except OSError as broken:
        return rank.death(broken.errno or 0)
    except ValueError as wrong:
        what = f"sent an answer that pytest cannot read ({wrong}); look for what writes to its connection"
        return rank.failure(Cause.RAISED, what)
    if "error" not in answer:
        return answer
    error = answer["error"]
    cause = Cause.RAISED_DISTRIBUTED if error["distributed"] else Cause.RAISED
    what = f"raised {short(error['summary'], MOST_SUMMARY_LETTERS)}"
    return rank.failure(cause, what, error["traceback"], limit=error.get("limit", False))
