"""Start the ranks of process sets by a launcher, such as srun, mpirun or torchrun.

The launcher starts join.py for each rank, on the nodes that it chooses. Each rank then connects to
a port of this process, which is open until all ranks of its process set have joined.
"""

from __future__ import annotations

import argparse
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
from ddpperf.machine.network import Interface
from ddpperf.workers import channel
from ddpperf.workers.channel import Message, SlowMessage
from ddpperf.workers.handshake import HANDSHAKE_SECONDS, accept, make_key, read_key, shut_down
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
STRANGE = (AuthenticationError, OSError, EOFError, ValueError, KeyError, TypeError, SlowMessage)
WORDS_SECONDS = 1.5  # from the end of a rank until its launcher has said why
TERM_SECONDS, KILL_SECONDS = 2.0, 3.0  # from the end of the ranks to SIGTERM, and then to SIGKILL
WORDS_LINES = 10


class LaunchFailed(Exception):
    """Raised if a launcher does not start all ranks.

    The message is the end of a sentence that begins with a rank that did not start. detail: what the
    launcher printed.
    """

    def __init__(self, what: str, rank: int = 0, detail: str = "") -> None:
        super().__init__(what)
        self.rank, self.detail = rank, detail


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A rank that has joined: what it told, its channel, and the connection of its output."""

    hello: Message
    commands: Connection
    output: Connection


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
        self._key_file = key_file
        self._failures: list[str] = []  # of the last process sets, until one has started
        make_key(key_file)
        self._key = read_key(key_file)

    def start(self, set_name: str, side: Side, ranks: int, variables: dict[str, str]) -> Launch:
        """Start the launcher for a process set. `Launch.join` then waits for the ranks.

        variables: of the ranks, besides those of the side. Raises LaunchFailed, also if the launcher
        has failed twice in a row.
        """
        if len(self._failures) > 1:
            raise LaunchFailed(f"{self._failures[-1]}; the launcher failed twice and is not tried again")
        welcome = {
            "set": set_name,
            "device": self.device,
            "images": self.images,
            "folder": os.getcwd(),
            "root": None if side.root is None else str(side.root),
            "command": side.command("rank"),
            "environment": travelling_environment(self.device) | side.variables() | variables,
        }
        return Launch(self, ranks, welcome)

    def commands(self, ranks: int, address: str) -> list[list[str]]:
        """Return the commands that start so many ranks: one a rank, one a node or one in all."""
        words = shlex.split(SHORT_NAMES.get(self.template, self.template))
        used = set(re.findall(r"\{(\w+)\}", self.template))
        join = [sys.executable, "-P", str(JOIN), address, str(self._key_file.absolute()), str(self.per_node)]
        port = free_port(self.interface)
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

    def failed(self, what: str, rank: int = 0, detail: str = "") -> LaunchFailed:
        """Remember a failure, and return the exception for it."""
        self._failures.append(what)
        return LaunchFailed(what, rank, detail)

    def accept(self, accepted: socket.socket) -> tuple[Connection, Message]:
        connection = accept(accepted, self._key)
        try:
            return connection, channel.receive(connection, HANDSHAKE_SECONDS)
        except BaseException:
            connection.close()
            raise

    def succeeded(self, joined: Sequence[Joined]) -> None:
        """Compare the nodes of the ranks that have joined, and remember their names.

        Raises Refused if the nodes differ, and LaunchFailed if a rank cannot start.
        """
        expected, hosts = node_facts(self.device, self.images), []
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
                raise self.failed(f"cannot start on node {host}: {short(str(problem), 200)}", rank)
            if rank % self.per_node == 0:
                require_equal(host, answer["facts"], expected)
                hosts.append({"name": host, "interface": str(answer["interface"])})
            one.hello.update(answer)
        self.hosts = self.hosts if len(self.hosts) > len(hosts) else hosts
        self._failures.clear()


class Launch:
    """The launcher's processes of one process set, what they print, and the port for its ranks."""

    def __init__(self, launcher: Launcher, ranks: int, welcome: Message) -> None:
        self._launcher, self._ranks, self._welcome = launcher, ranks, welcome
        address = launcher.interface.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.settimeout(LOOK_SECONDS)
        host = f"[{address}]" if ":" in address else address
        commands = launcher.commands(ranks, f"{host}:{self._listener.getsockname()[1]}")
        self.name = Path(commands[0][0]).name
        self._words_end = 0.0
        self._connections: list[Connection] = []  # until their ranks are handed over
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
                    raise launcher.failed(
                        f"did not start: {self.name} cannot be started ({error.strerror})"
                    ) from error
                self._processes.append(started)

    def join(self) -> list[Joined]:
        """Wait until all ranks have joined, and return them in their order.

        Raises LaunchFailed if the launcher ends before, or after JOIN_SECONDS, and Refused if the
        nodes differ.
        """
        found: dict[int, dict[bool, tuple[Connection, Message]]] = {}
        end, refused = time.monotonic() + JOIN_SECONDS, ""
        with self._listener:
            while sum(map(len, found.values())) < 2 * self._ranks:
                try:
                    accepted, _ = self._listener.accept()
                    connection, hello = self._launcher.accept(accepted)
                    self._connections.append(connection)
                    rank = self._expected_rank(hello)
                    found.setdefault(rank, {})[hello["is_output"]] = connection, hello
                    if not hello["is_output"]:
                        channel.send(connection, self._welcome)
                except TimeoutError:
                    self._require_started(end, sorted(set(range(self._ranks)) - found.keys()), refused)
                except STRANGE as error:
                    refused = f"; a connection was refused ({type(error).__name__}: {short(str(error))})"
        joined = [
            Joined(hello=found[rank][False][1], commands=found[rank][False][0], output=found[rank][True][0])
            for rank in range(self._ranks)
        ]
        self._launcher.succeeded(joined)
        self._connections.clear()
        return joined

    def _expected_rank(self, hello: Message) -> int:
        rank, size = int(hello["rank"]), int(hello["size"])
        if size != self._ranks or not 0 <= rank < size:
            what = f"did not start: {self.name} started rank {rank} of {size}, not of {self._ranks}"
            raise self._launcher.failed(what)
        return rank

    def _require_started(self, end: float, missing: Sequence[int], refused: str) -> None:
        statuses = [wait_for_exit(process) for process in self._processes]
        late = time.monotonic() > end
        if not late and not any(statuses) and None in statuses:
            return
        how = (
            f"did not join within {JOIN_SECONDS:g} s"
            if late
            else f"did not start: {self.name} {self.how_it_ended(0)}"
        )
        raise self._launcher.failed(how + refused, missing[0], "\n".join(self.words(missing[0])))

    def has_ended(self, rank: int) -> bool:
        """Return whether the launcher's process that started a rank has ended."""
        return wait_for_exit(self._of(rank)) is not None

    def how_it_ended(self, rank: int) -> str:
        """Return how the launcher's process that started a rank has ended."""
        status = wait_for_exit(self._of(rank))
        return "runs" if status is None else describe_status(status).removesuffix(" before it answered")

    def how_rank_ended(self, rank: int) -> str:
        """Return how a rank has ended: its status, if the launcher was started for this rank alone."""
        alone = len(self._processes) == self._ranks
        return self.how_it_ended(rank) if alone and self.has_ended(rank) else "ended"

    def _of(self, rank: int) -> subprocess.Popen[bytes]:
        return self._processes[rank * len(self._processes) // self._ranks]

    def words(self, rank: int) -> list[str]:
        """Return the last lines of the launcher, once it has ended or WORDS_SECONDS are over.

        These seconds begin at the first call, however many ranks end.
        """
        self._words_end = self._words_end or time.monotonic() + WORDS_SECONDS
        wait_for_exit(self._of(rank), max(0.0, self._words_end - time.monotonic()))
        return [line for line in self._output.end().splitlines() if line.strip()][-WORDS_LINES:]

    def end(self) -> None:
        """End the launcher's processes, whose ranks have ended: wait, then SIGTERM, then SIGKILL."""
        self._listener.close()
        for connection in self._connections:
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


def fill(word: str, values: Mapping[str, object]) -> str:
    """Return a word of a template with its placeholders replaced."""
    return re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), word)


def launcher(template: str) -> str:
    """Return the template of a launcher, or raise ArgumentTypeError if it cannot be used."""
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a command, got {template!r} ({error})") from error
    unknown = set(re.findall(r"\{(\w+)\}", template)) - set(PLACEHOLDERS)
    if not words or unknown:
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        found = f"{{{min(unknown)}}}" if unknown else "nothing"
        raise argparse.ArgumentTypeError(f"must be a command with none but {known}, got {found}")
    return template


def free_port(interface: Interface) -> int:
    """Return a port that is free now, for a launcher's own meeting of its nodes."""
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    with socket.create_server((interface.address, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        return port
