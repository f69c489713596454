"""A set of rank processes on one node: told what to do over their channels, waited for together, and never left running."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

from ddpperf.workers import channel
from ddpperf.workers.channel import Message
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.rank_process import EXIT_SECONDS, RankProcess, stacks_of

START_SECONDS = 120  # to import torch on a busy machine and to make a CUDA context
GATHER_SECONDS = 0.2  # after a first failure, for the failures that came before it or follow from it
GROUP_GRACE_SECONDS = (
    300  # a group outlives every deadline, so that the controller is the first to find a hang
)


class ProcessSet:
    """`size` ranks. `spawn` returns at once, `connect` when all have begun, `wait_ready` when they have their devices; every
    failure kills the whole set.

    folder: a private folder for the socket and the ranks' temporary files. log_folder: where each rank's output goes, one
    file a rank. deadline_seconds: how long a rank may take over one command, or be silent in one that reports its progress.
    cores: by rank, those it is kept on. progress: whom to tell how much of such a command is done.
    """

    def __init__(
        self,
        name: str,
        *,
        side: Side,
        size: int,
        device: str,
        folder: Path,
        log_folder: Path,
        deadline_seconds: float,
        cores: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.name = name
        self.side = side
        self.size = size
        self.device = device
        self.deadline_seconds = deadline_seconds
        self.cores = cores
        self.progress: Callable[[float], None] = lambda fraction: None
        self.environment: Message = {}
        self.fewest_mapped = size  # ranks that had their memory mapped together
        self.alive = True
        self.ranks: list[RankProcess] = []
        self._folder = (
            folder / name
        )  # of its own, so that a set that dies leaves no half of a compiled kernel to others
        self._log_folder = log_folder
        self._listener = channel.Listener(folder / f"{name}.socket")
        self._store_port = 0
        self._group_size = 0
        self._groups_made = 0
        self._asked: tuple[str, list[RankProcess]] = ("", [])

    # --- starting

    def spawn(self) -> None:
        with self._killed_if_it_fails():
            try:
                self._folder.mkdir()
                for rank in range(self.size):
                    self.ranks.append(self._started(rank))
            except OSError as error:
                what = f"could not be started: {error.filename or self.side.python}: {error.strerror}"
                failure = RankFailure(rank=len(self.ranks), cause=Cause.DIED, what=what, detail="")
                raise self._failure("start", [failure]) from error

    def _started(self, rank: int) -> RankProcess:
        log = self._log_folder / f"{self.name}-rank{rank}.log"
        return RankProcess(
            rank, device=self.device, side=self.side, listener=self._listener, log=log, folder=self._folder
        )

    def connect(self) -> None:
        with self._killed_if_it_fails():
            self._accept_all(time.monotonic() + START_SECONDS)
        self._listener.close()
        self.ask("setup", device=self.device, cores=self.cores)

    def wait_ready(self) -> None:
        answers = self.answers(START_SECONDS)
        self._store_port = answers[0]["port"]
        self.environment = answers[0]["environment"]

    def _accept_all(self, end: float) -> None:
        while missing := [rank for rank in self.ranks if rank.connection is None]:
            if dead := [rank.death() for rank in missing if rank.is_dead()]:
                raise self._failure("start", dead)
            if time.monotonic() > end:
                raise self._failure("start", self._hangs([rank.rank for rank in missing], START_SECONDS))
            accepted = self._listener.accept(timeout_seconds=0.05)
            if accepted is not None:  # in no order: a rank says which one it is
                new, hello = accepted
                self.ranks[hello["rank"]].connection = new

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
        self.ask(command, ranks=ranks, **arguments)
        return self.answers(deadline_seconds)

    def ask(self, command: str, *, ranks: Iterable[int] | None = None, **arguments: object) -> None:
        """Send one command to `ranks` (default: all), whose `answers` must be waited for before the next one."""
        asked = self.ranks if ranks is None else [self.ranks[rank] for rank in ranks]
        self._asked = command, asked
        with self._killed_if_it_fails():
            for rank in asked:
                assert rank.connection is not None
                with contextlib.suppress(OSError):  # a dead rank's connection then ends when read
                    channel.send(rank.connection, {"command": command, **arguments})

    def answers(self, deadline_seconds: float | None = None) -> dict[int, Message]:
        """Those to the last command, by rank; raises SetFailure, the set then dead."""
        with self._killed_if_it_fails():
            return self._collect(*self._asked, deadline_seconds or self.deadline_seconds)

    def _collect(self, command: str, asked: list[RankProcess], deadline_seconds: float) -> dict[int, Message]:
        """Wait for all ranks at once: read in order, a raise in rank 1 would look like a hang of rank 0."""
        end = time.monotonic() + deadline_seconds
        waiting = {rank.connection: rank for rank in asked if rank.connection is not None}
        answers: dict[int, Message] = {}
        dead: list[RankProcess] = []
        raised: list[RankFailure] = []
        while waiting and (remaining := end - time.monotonic()) > 0:
            # A short wait, then a look at the processes: a child that inherited a dead rank's connection keeps it open.
            ready = connection.wait(list(waiting), timeout=min(remaining, 0.1))
            ready += [each for each, rank in waiting.items() if each not in ready and rank.is_dead()]
            for each in ready:
                assert isinstance(each, Connection)
                rank = waiting.pop(each)
                try:
                    if rank.is_dead() and not each.poll(0):
                        raise EOFError  # only its end is missing, which a child of its own keeps open
                    answer = channel.receive(each)
                except (EOFError, OSError):
                    dead.append(rank)
                else:
                    if "progress" in answer:  # no answer yet, and no hang either
                        waiting[each] = rank
                        end = end if dead or raised else time.monotonic() + deadline_seconds
                        self.progress(answer["progress"])
                        continue
                    answers[rank.rank] = answer
                    if "error" in answer:
                        raised.append(_raised(rank.rank, answer["error"]))
                if dead or raised:
                    end = min(end, time.monotonic() + GATHER_SECONDS)
        if dead or raised:
            raise self._failure(command, [*(rank.death() for rank in dead), *raised])
        if waiting:
            raise self._failure(
                command, self._hangs([rank.rank for rank in waiting.values()], deadline_seconds)
            )
        return answers

    def dead_ranks(self) -> list[RankProcess]:
        """The ranks whose process has ended, asked or not."""
        return [rank for rank in self.ranks if rank.is_dead()]

    def require_alive(self) -> None:
        """Raise SetFailure if a rank has died, even one that had nothing to do."""
        with self._killed_if_it_fails():
            if dead := self.dead_ranks():
                raise self._failure("no command", [rank.death() for rank in dead])

    def join(self, world_size: int) -> bool:
        """Have ranks 0..world_size-1 form the default process group; whether there is something to wait for."""
        if self._group_size == world_size:
            return False
        self.leave()
        self._groups_made += 1
        self.ask(
            "join",
            ranks=range(world_size),
            port=self._store_port,
            name=f"group{self._groups_made}",
            world_size=world_size,
            timeout_seconds=self.deadline_seconds + GROUP_GRACE_SECONDS,
        )
        self._group_size = world_size  # or it is dead
        return True

    def leave(self, unless: int = 0) -> None:
        """End the process group, if there is one, unless it has as many ranks."""
        if self._group_size not in (0, unless):
            self.request("leave", ranks=range(self._group_size))
            self._group_size = 0

    # --- ending

    def begin_to_close(self) -> None:
        """Ask the ranks to end by themselves; harmless when repeated."""
        if self.alive and self._asked[0] != "exit":
            self.ask("exit")

    def close(self) -> None:
        """Let the ranks end by themselves, then make sure that they did."""
        self.begin_to_close()
        if self.alive:
            with contextlib.suppress(SetFailure):
                self.answers(EXIT_SECONDS)
                for rank in self.ranks:
                    rank.wait()
        self.kill()

    @contextlib.contextmanager
    def _killed_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End every rank and whatever it started, at once; harmless when repeated."""
        self.alive = False
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()
            rank.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._listener.close()

    # --- failures

    def _failure(self, command: str, failures: list[RankFailure]) -> SetFailure:
        return SetFailure(self.name, f"at {command}", failures)

    def _hangs(self, ranks: list[int], deadline_seconds: float) -> list[RankFailure]:
        """The failures of ranks that did not answer; the first one has the stacks of every rank of the set."""
        detail = "\n".join(
            [*stacks_of(self.ranks), "if it is only slow, as compiling can be: a longer --deadline"]
        )
        what = f"did not answer within {deadline_seconds:g} s"
        return [
            RankFailure(rank=rank, cause=Cause.HUNG, what=what, detail=detail if rank == min(ranks) else "")
            for rank in ranks
        ]


def _raised(rank: int, error: Message) -> RankFailure:
    cause = Cause.RAISED_DISTRIBUTED if error["distributed"] else Cause.RAISED
    return RankFailure(
        rank=rank,
        cause=cause,
        what=f"raised {error['summary']}",
        detail=error["traceback"],
        limit=error.get("limit", False),
    )
