"""Start the ranks of process sets by a launcher, such as srun, mpirun or torchrun.

The launcher starts join.py for each rank, on the nodes that it chooses. Each rank then connects to
a port of this process, which is open until all ranks of its process set have joined.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

from ddpperf.errors import Refused, short
from ddpperf.machine.child_process import describe_status, wait_for_exit
from ddpperf.machine.network import Interface, listen
from ddpperf.workers import channel
from ddpperf.workers.channel import Message, SlowMessage
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.handshake import HANDSHAKE_SECONDS, make_key, read_key, shake_hands, shut_down
from ddpperf.workers.interpreter import Side, travelling_environment
from ddpperf.workers.node_facts import node_facts, require_equal
from ddpperf.workers.rank_output import RankOutput

JOIN = Path(__file__).with_name("join.py")
SHORT_NAMES = {
    "srun": "srun --overlap --nodes={nodes} --ntasks={ranks} --ntasks-per-node={per_node}"
    " --cpu-bind=none --mpi=none --kill-on-bad-exit=1",
    "mpirun": "mpirun -np {ranks} --map-by ppr:{per_node}:node --bind-to none",
}
PLACEHOLDERS = ("nodes", "per_node", "ranks", "node", "rank", "local_rank", "address", "port")
PREPARE_SECONDS = 60.0  # for a rank to pin itself, and to describe its node
JOIN_SECONDS = 60.0  # from the start of a launcher until its last rank has joined
LOOK_SECONDS = 0.1
STRANGE = (AuthenticationError, OSError, EOFError, SlowMessage)
WORDS_SECONDS = 1.5  # from the end of a rank until its launcher has said why
TERM_SECONDS, KILL_SECONDS = 2.0, 3.0  # from the end of the ranks to SIGTERM, and then to SIGKILL
WORDS_LINES = 10


@dataclass(kw_only=True)
class Joined:
    """A rank that has joined: its first message, and its connections for commands and for output."""

    hello: Message
    commands: Connection
    output: Connection | None = None


class Launcher:
    """The launcher of a run, which starts the ranks of each process set.

    template: the launcher's command, or one of SHORT_NAMES. interface: where this process listens.
    images: the file of decoded images, or "". key_file: a new file for the key of the run; `close`
    removes it. hosts: the name and the network interface of each node, once ranks have joined.
    """

    def __init__(
        self,
        template: str,
        *,
        nodes: int,
        per_node: int,
        device: str,
        interface: Interface,
        images: str,
        key_file: Path,
    ) -> None:
        self.template, self.nodes, self.per_node = template, nodes, per_node
        self.device, self.interface, self.images = device, interface, images
        self.hosts: list[dict[str, str]] = []
        # Both before pytest's process moves to its own cores, which its children would inherit.
        self._cores = os.sched_getaffinity(0)
        self._facts = node_facts(device, images)
        self._key_file = key_file
        self._failures: list[str] = []  # of the last process sets, until one has started
        make_key(key_file)
        self._key = read_key(key_file)

    def start(self, set_name: str, side: Side, ranks: int, variables: dict[str, str]) -> Launch:
        """Start the launcher for a process set. `Launch.join` then waits for the ranks.

        variables: of the ranks, besides those of the side. Raises SetFailure, also if the launcher has
        failed twice in a row.
        """
        if len(self._failures) > 1:
            what = f"{self._failures[-1]}; the launcher failed twice and is not tried again"
            raise _not_started(set_name, what)
        welcome = {
            "set": set_name,
            "device": self.device,
            "images": self.images,
            "folder": os.getcwd(),
            "root": None if side.root is None else str(side.root),
            "command": side.command("rank"),
            "environment": travelling_environment(self.device) | side.variables() | variables,
        }
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            return Launch(self, ranks, welcome)
        finally:
            os.sched_setaffinity(0, mine)

    def commands(self, ranks: int, address: str) -> list[list[str]]:
        """Return the commands that start the ranks: one per rank, one per node, or one in all."""
        words = shlex.split(SHORT_NAMES.get(self.template, self.template))
        used = set(re.findall(r"\{(\w+)\}", self.template))
        join = [sys.executable, "-P", str(JOIN), address, str(self._key_file.absolute()), str(self.per_node)]
        with listen(self.interface.address) as free:  # for a launcher's own meeting of its nodes
            port = free.getsockname()[1]
        if used & {"rank", "local_rank"}:
            started = range(ranks)
        else:
            started = range(0, ranks, self.per_node if "node" in used else ranks)
        commands = []
        for rank in started:
            values = {
                "nodes": -(-ranks // self.per_node),
                "per_node": min(self.per_node, ranks),
                "ranks": ranks,
                "node": rank // self.per_node,
                "rank": rank,
                "local_rank": rank % self.per_node,
                "address": self.interface.address,
                "port": port,
            }
            commands.append([fill(word, values) for word in words] + join)
        return commands

    def close(self) -> None:
        """Remove the key. May be called again."""
        self._key_file.unlink(missing_ok=True)

    # --- used by `Launch`

    def failed(self, set_name: str, what: str, rank: int = 0, detail: str = "") -> SetFailure:
        """Remember a failure, and return the exception for it.

        what: the end of a sentence that begins with the rank. detail: what the launcher printed.
        """
        self._failures.append(what)
        return _not_started(set_name, what, rank, detail)

    def accept(self, listener: socket.socket) -> tuple[Connection, Message]:
        """Accept a connection of a rank, and return it with the rank's first message."""
        accepted, _ = listener.accept()
        connection = shake_hands(accepted, self._key, HANDSHAKE_SECONDS, asks_first=True)
        try:
            return connection, channel.receive(connection, HANDSHAKE_SECONDS)
        except BaseException:
            connection.close()
            raise

    def succeeded(self, set_name: str, joined: Sequence[Joined]) -> None:
        """Compare the nodes of the ranks that have joined, and remember their names.

        Raises Refused if the nodes differ, and SetFailure if a rank cannot start.
        """
        hosts = []
        for rank, one in enumerate(joined):
            host = short(str(one.hello["host"]))
            if (local := one.hello["local_rank"]) != rank % self.per_node:
                what = f"the launcher started rank {rank} as local rank {local} on node {host}"
                raise Refused(
                    f"{what}; it must fill each node with {self.per_node} ranks, one node after the other"
                )
            try:
                answer = channel.receive(one.commands, PREPARE_SECONDS)
            except (OSError, EOFError, ValueError, SlowMessage) as error:
                answer = {"problem": f"it did not prepare itself ({error or type(error).__name__})"}
            if problem := answer.get("problem"):
                what = f"cannot start on node {host}: {short(str(problem), 200)}"
                raise self.failed(set_name, what, rank)
            if rank % self.per_node == 0:
                require_equal(host, answer["facts"], self._facts)
                hosts.append({"name": host, "interface": str(answer["interface"])})
            one.hello.update(answer)
        self.hosts = self.hosts if len(self.hosts) > len(hosts) else hosts
        self._failures.clear()


class Launch:
    """The launcher's processes of one process set, what they print, and the port for its ranks."""

    def __init__(self, launcher: Launcher, ranks: int, welcome: Message) -> None:
        self._launcher, self._ranks, self._welcome = launcher, ranks, welcome
        self._set_name: str = welcome["set"]
        self._listener = listen(launcher.interface.address)
        self._listener.settimeout(LOOK_SECONDS)
        host, port, *_ = self._listener.getsockname()
        commands = launcher.commands(ranks, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self.name = Path(commands[0][0]).name
        self._words_end = 0.0
        self._joined: dict[int, Joined] = {}  # by rank, until all ranks are handed over
        self._processes: list[subprocess.Popen[bytes]] = []
        reader, writer = os.pipe()
        self._output = RankOutput(reader)
        with open(writer, "wb", buffering=0) as output:
            for command in commands:
                try:
                    started = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
                    )
                except OSError as error:
                    self.end()
                    what = f"did not start: {self.name} cannot be started ({error.strerror})"
                    raise launcher.failed(self._set_name, what) from error
                self._processes.append(started)

    def join(self) -> list[Joined]:
        """Wait until all ranks have joined, and return them in their order.

        Raises SetFailure if the launcher ends before, or after JOIN_SECONDS, and Refused if the
        nodes differ.
        """
        end, refused = time.monotonic() + JOIN_SECONDS, ""
        with self._listener:
            while missing := [rank for rank in range(self._ranks) if not self._has_joined(rank)]:
                try:
                    connection, hello = self._launcher.accept(self._listener)
                    self._add(connection, hello)
                except TimeoutError:
                    self._require_started(end, missing, refused)
                except STRANGE as error:
                    refused = f"; a connection was refused ({type(error).__name__}: {short(str(error))})"
        joined = [self._joined[rank] for rank in range(self._ranks)]
        self._launcher.succeeded(self._set_name, joined)
        self._joined.clear()
        return joined

    def _has_joined(self, rank: int) -> bool:
        return rank in self._joined and self._joined[rank].output is not None

    def _add(self, connection: Connection, hello: Message) -> None:
        """Take a rank's first connection for its commands, and the second one for its output."""
        rank, size = int(hello["rank"]), int(hello["size"])
        if size != self._ranks or not 0 <= rank < size:
            connection.close()
            what = f"did not start: {self.name} started rank {rank} of {size}, not of {self._ranks}"
            raise self._launcher.failed(self._set_name, what)
        if rank in self._joined:
            self._joined[rank].output = connection
        else:
            self._joined[rank] = Joined(hello=hello, commands=connection)
            channel.send(connection, self._welcome)

    def _require_started(self, end: float, missing: Sequence[int], refused: str) -> None:
        """Raise SetFailure if the time is over, or if the launcher's process of a missing rank has ended."""
        ended = [rank for rank in missing if self.ending(rank)]
        rank = [*ended, *missing][0]
        if ended:
            how = f"did not start: {self.name} {self.ending(rank)}"
        elif time.monotonic() > end:
            how = f"did not join within {JOIN_SECONDS:g} s"
        else:
            return
        raise self._launcher.failed(self._set_name, how + refused, rank, "\n".join(self.words(rank)))

    def ending(self, rank: int, seconds: float = 0.0) -> str:
        """Return how the launcher's process that started a rank has ended, or "" if it runs.

        seconds: how long to wait for its end.
        """
        process = self._processes[rank * len(self._processes) // self._ranks]
        status = wait_for_exit(process, seconds)
        return "" if status is None else describe_status(status).removesuffix(" before it answered")

    def how_rank_ended(self, rank: int) -> str:
        """Return how a rank has ended: its status, if the launcher was started for this rank alone."""
        alone = len(self._processes) == self._ranks
        return (alone and self.ending(rank)) or "ended"

    def words(self, rank: int) -> list[str]:
        """Return the last lines of the launcher, once it has ended or WORDS_SECONDS are over.

        These seconds begin at the first call, however many ranks end.
        """
        self._words_end = self._words_end or time.monotonic() + WORDS_SECONDS
        self.ending(rank, max(0.0, self._words_end - time.monotonic()))
        return [line for line in self._output.end().splitlines() if line.strip()][-WORDS_LINES:]

    def end(self) -> None:
        """End the launcher's processes, whose ranks have ended: wait, then SIGTERM, then SIGKILL."""
        self._listener.close()
        for joined in self._joined.values():
            for connection in (joined.commands, joined.output):
                if connection is not None:
                    shut_down(connection)
                    connection.close()
        for seconds, number in ((TERM_SECONDS, signal.SIGTERM), (KILL_SECONDS, signal.SIGKILL)):
            end = time.monotonic() + seconds
            for process in self._processes:
                if wait_for_exit(process, max(0.0, end - time.monotonic())) is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
        for process in self._processes:
            process.wait()
        self._output.close()


def _not_started(set_name: str, what: str, rank: int = 0, detail: str = "") -> SetFailure:
    failure = RankFailure(rank=rank, cause=Cause.DIED, what=what, detail=detail)
    return SetFailure(set_name, "at start", [failure])


def fill(word: str, values: Mapping[str, object]) -> str:
    """Return a word of a template with its placeholders replaced."""
    return re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), word)


def launcher(template: str) -> str:
    """Return the template of a launcher. Raises ValueError if it is no command that can be used."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ValueError(f"takes a command ({error})") from error
    unknown = set(re.findall(r"\{(\w+)\}", template)) - set(PLACEHOLDERS)
    if not words or unknown:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"takes a command with none but {known}")
    return template
