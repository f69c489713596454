"""Start the ranks of process sets by a launcher, such as srun, mpirun or torchrun.

The launcher starts launched_rank.py for each rank, on the nodes that it chooses. Each rank then
connects to a port of this process, which is open until all ranks of its process set have joined. A
launched rank ends when its connection ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import ddpperf
from ddpperf.errors import Refused, short
from ddpperf.io.private_folders import remove_folder
from ddpperf.machine.child_process import describe_status, wait_for_exit
from ddpperf.machine.gpu_description import visible_gpus
from ddpperf.machine.hardware import hardware_key
from ddpperf.machine.network import Interface
from ddpperf.workers import channel
from ddpperf.workers.channel import HANDSHAKE_SECONDS, Message, SlowMessage, shake_hands, socket_of
from ddpperf.workers.failures import Cause, RankFailure, SetFailure
from ddpperf.workers.interpreter import Side, travelling_environment
from ddpperf.workers.rank_handles import RankHandle
from ddpperf.workers.rank_output import RankOutput

LAUNCHED_RANK = Path(__file__).with_name("launched_rank.py")
KEY_VARIABLE = "DDPPERF_KEY"  # holds the key where the nodes share no folder
COMPARED_BYTES = 2**20  # at the end of the file of images, where an archive has checksums
NETWORK_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
SHORT_NAMES = {
    "srun": "srun --overlap --nodes={nodes} --ntasks={ranks} --ntasks-per-node={per_node}"
    " --cpu-bind=none --mpi=none --kill-on-bad-exit=1",
    "mpirun": "mpirun -np {ranks} --map-by ppr:{per_node}:node --bind-to none",
}
PLACEHOLDERS = ("nodes", "per_node", "ranks", "node", "rank", "local_rank", "address", "port")
JOIN_SECONDS = 60.0  # from the start of a launcher until its last rank has joined
LOOK_SECONDS = 0.1
STRANGE = (AuthenticationError, OSError, EOFError, SlowMessage)
WORDS_SECONDS = 5.0  # from the end of a rank until its launcher has said why; torchrun on a busy node needs 2
TERM_SECONDS, KILL_SECONDS = 2.0, 3.0  # from the end of the ranks to SIGTERM, and then to SIGKILL
WORDS_LINES = 10


@dataclass(kw_only=True)
class Launcher:
    """The launcher of a run, which starts the ranks of each process set.

    template: the launcher's command, or one of SHORT_NAMES. interface: where this process listens.
    images: the file of decoded images, or "". key_file: new, with the key of the run, until `close`.
    hosts: the name and the network interface of each node, once ranks have joined. failures: of the
    last process sets, until one has started.
    """

    template: str
    per_node: int
    device: str
    interface: Interface
    images: str
    key_file: Path
    hosts: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Both before pytest's process moves to its own cores, which its children would inherit.
        self.cores = os.sched_getaffinity(0)
        self.facts = node_facts(self.device, self.images)
        self.key_file = self.key_file.absolute()
        self.key = os.environ.get(KEY_VARIABLE, "")
        if not self.key:
            self.key = secrets.token_hex(32)
            self.key_file.parent.mkdir(parents=True, exist_ok=True)
            self.key_file.unlink(missing_ok=True)  # of a killed run that had the same process id
            self.key_file.touch(0o600, exist_ok=False)
            self.key_file.write_text(self.key, encoding="utf-8")

    def commands(self, ranks: int, address: str) -> list[list[str]]:
        """Return the commands that start the ranks: one per rank, one per node, or one for all ranks."""
        words = shlex.split(SHORT_NAMES.get(self.template, self.template))
        used = set(re.findall(r"\{(\w+)\}", self.template))
        join = [sys.executable, "-P", str(LAUNCHED_RANK), address, str(self.key_file), str(self.per_node)]
        join += [self.device, *filter(None, [self.images])]  # ssh would lose an empty argument
        with socket.create_server((self.interface.address, 0)) as free:  # for the launcher's own meeting
            port = free.getsockname()[1]
        step = 1 if used & {"rank", "local_rank"} else self.per_node if "node" in used else ranks

        def filled(word: str, rank: int) -> str:
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
            return re.sub(r"\{(\w+)\}", lambda found: str(values[found[1]]), word)

        return [[filled(word, rank) for word in words] + join for rank in range(0, ranks, step)]

    def close(self) -> None:
        """Remove the key. May be called again."""
        self.key_file.unlink(missing_ok=True)


class Launch:
    """The launcher's processes of one process set, what they print, and the port for its ranks.

    The constructor starts the launcher, and `join` waits for the ranks. variables: of the ranks, besides
    those of the side. Raises SetFailure if the launcher does not start, or has failed twice in a row.
    """

    def __init__(
        self, launcher: Launcher, set_name: str, side: Side, ranks: int, variables: dict[str, str]
    ) -> None:
        self._launcher, self._set_name, self._ranks = launcher, set_name, ranks
        self._welcome = {
            "set": set_name,
            "folder": os.getcwd(),
            "root": None if side.root is None else str(side.root),
            "command": side.command("rank"),
            "environment": travelling_environment(launcher.device) | side.variables() | variables,
        }
        if len(launcher.failures) > 1:
            raise self._failure(f"{launcher.failures[1]}; the launcher failed twice and is not tried again")
        self._listener = socket.create_server((launcher.interface.address, 0), backlog=1024)
        self._listener.settimeout(LOOK_SECONDS)
        host, port, *_ = self._listener.getsockname()
        commands = launcher.commands(ranks, f"{host}:{port}")
        self.name = Path(commands[0][0]).name
        self._words_end = 0.0
        self._joined: dict[int, list[tuple[Message, Connection]]] = {}  # by rank, until all have joined
        self._processes: list[subprocess.Popen[bytes]] = []
        reader, writer = os.pipe()
        self._output = RankOutput(reader)
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, launcher.cores)
        try:
            with open(writer, "wb", buffering=0) as out, open(os.devnull, encoding="utf-8") as nothing:
                for command in commands:
                    process = subprocess.Popen(
                        command, stdin=nothing, stdout=out, stderr=out, process_group=0
                    )
                    self._processes.append(process)
        except OSError as error:
            self.end()
            raise self._failure(f"did not start: {self.name} cannot be started ({error.strerror})") from error
        finally:
            os.sched_setaffinity(0, mine)

    def join(self, log: Callable[[int], Path | None]) -> list[RankHandle]:
        """Wait until all ranks have joined, compare their nodes, and return the ranks.

        log: returns the file for what a rank prints, or None. Raises SetFailure if the launcher ends
        before, or after JOIN_SECONDS, and Refused if the nodes differ.
        """
        end = time.monotonic() + JOIN_SECONDS
        with self._listener:
            while missing := [rank for rank in range(self._ranks) if len(self._joined.get(rank, ())) < 2]:
                try:
                    self._accept()
                except TimeoutError:
                    self._require_started(end, missing)
                except STRANGE:
                    continue  # no rank of this run: it closes the connection
        hosts = []
        for rank, ((hello, connection), _) in sorted(self._joined.items()):
            host = short(str(hello["host"]))
            self._require_equal(rank, host, hello)
            if rank % self._launcher.per_node == 0:
                hosts.append({"name": host, "interface": str(hello["interface"])})
            with contextlib.suppress(OSError):  # the rank has ended, which its first command reports
                channel.send(connection, self._welcome)
        if len(hosts) > len(self._launcher.hosts):
            self._launcher.hosts = hosts
        self._launcher.failures.clear()
        ranks: list[RankHandle] = [
            LaunchedRank(self, hello, commands, output, log(rank))
            for rank, ((hello, commands), (_, output)) in sorted(self._joined.items())
        ]
        self._joined.clear()
        return ranks

    def _accept(self) -> None:
        """Accept a rank's first connection for its commands, or the second one for its output."""
        accepted, _ = self._listener.accept()
        connection = shake_hands(accepted, self._launcher.key.encode(), HANDSHAKE_SECONDS, asks_first=True)
        hello = channel.receive(connection, HANDSHAKE_SECONDS)
        rank, size = int(hello["rank"]), int(hello["size"])
        if size != self._ranks or not 0 <= rank < size:
            what = f"did not start: {self.name} started rank {rank} of {size}, not of {self._ranks}"
            raise self._failure(what)
        self._joined.setdefault(rank, []).append((hello, connection))

    def _require_equal(self, rank: int, host: str, hello: Message) -> None:
        """Raise Refused if a rank has a wrong local rank, or if its node differs from the controller's."""
        per_node, local = self._launcher.per_node, hello["local_rank"]
        if local != rank % per_node:
            what = f"the launcher started rank {rank} as local rank {local} on node {host}"
            raise Refused(f"{what}; it must fill each node with {per_node} ranks, one node after the other")
        for fact, value in self._launcher.facts.items() if rank % per_node == 0 else ():
            if (other := hello["facts"].get(fact, "unknown")) != value:
                what = f"{fact} on node {host} is {short(str(other))}, where pytest runs it is {value}"
                raise Refused(f"{what}; all nodes of a run must be equal, so change one of the two nodes")

    def _require_started(self, end: float, missing: Sequence[int]) -> None:
        """Raise SetFailure if the time is over, or if the launcher's process of a missing rank has ended."""
        rank = next((rank for rank in missing if self.ending(rank)), missing[0])
        if ending := self.ending(rank):
            how = f"did not start: {self.name} {ending}"
        elif time.monotonic() > end:
            how = f"did not join within {JOIN_SECONDS:g} s"
        else:
            return
        raise self._failure(how, rank, "\n".join(self.words(rank)))

    def _failure(self, what: str, rank: int = 0, detail: str = "") -> SetFailure:
        """Record that the launcher has failed, and return the exception that reports it."""
        self._launcher.failures.append(what)
        failure = RankFailure(rank=rank, cause=Cause.DIED, what=what, detail=detail)
        return SetFailure(self._set_name, "at start", [failure])

    def process_of(self, rank: int) -> subprocess.Popen[bytes]:
        return self._processes[rank * len(self._processes) // self._ranks]

    def ending(self, rank: int, seconds: float = 0.0) -> str:
        """Return how the launcher's process of a rank has ended within so many seconds, or ""."""
        status = wait_for_exit(self.process_of(rank), seconds)
        return "" if status is None else describe_status(status)

    def words(self, rank: int) -> list[str]:
        """Return the last lines of the launcher, once it has ended or WORDS_SECONDS after the first call."""
        self._words_end = self._words_end or time.monotonic() + WORDS_SECONDS
        self.ending(rank, max(0.0, self._words_end - time.monotonic()))
        return [line for line in self._output.end().splitlines() if line.strip()][-WORDS_LINES:]

    def end(self) -> None:
        """End the launcher's processes, whose ranks have ended: wait, then SIGTERM, then SIGKILL."""
        self._listener.close()
        for joined in self._joined.values():
            for _, connection in joined:
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


class LaunchedRank(RankHandle):
    """A rank on any node, which ends when its connection ends.

    hello: the rank's first message. commands, output: its connections.
    """

    def __init__(
        self, launch: Launch, hello: Message, commands: Connection, output: Connection, log: Path | None
    ) -> None:
        rank, where = int(hello["rank"]), f" on node {short(str(hello['host']))}"
        with output:
            read = RankOutput(os.dup(output.fileno()), log)
        super().__init__(rank, commands, read, launch.process_of(rank), where=where)
        is_here = hello["machine"] == machine_id()
        self.pid = hello["pid"] if is_here else None
        self._folder = Path(hello["temporary"]) if is_here else None
        self._launch = launch
        self._hangup = select.poll()
        self._hangup.register(commands.fileno(), select.POLLRDHUP)

    def is_dead(self) -> bool:
        return bool(self._hangup.poll(0)) or super().is_dead()

    def _ending(self, error: int) -> tuple[str, list[str]]:
        launch = self._launch
        with socket_of(self.connection) as connected:
            error = error or connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error in NETWORK_LOST:
            return f"was lost: its node or the network does not answer ({os.strerror(error)})", []
        lines = launch.words(self.rank)
        ending = launch.ending(self.rank)
        what = f"ended, and {launch.name} {ending}" if ending else "ended"
        return what, [f"{launch.name} printed:", *lines] if lines else []

    def wait(self, seconds: float) -> None:
        self.output.wait(seconds)

    def kill(self) -> None:
        with contextlib.suppress(OSError), socket_of(self.connection) as connected:
            connected.shutdown(socket.SHUT_RDWR)  # an error: the connection has ended

    def close(self) -> None:
        self.output.close()
        self.connection.close()
        if self._folder is not None:
            remove_folder(self._folder)  # which a killed rank left


def machine_id() -> str:
    """Return an identifier of this machine and its process ids, which changes at each boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def node_facts(device: str, images: str) -> dict[str, str]:
    """Return the facts of this node that must be equal on all nodes, so that times can be compared."""
    gpus = visible_gpus() if device == "cuda" else []
    package, code = Path(ddpperf.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    found = "none"
    try:
        if images:
            with open(images, "rb") as file:
                file.seek(max(0, (size := os.path.getsize(images)) - COMPARED_BYTES))
                found = f"{size} bytes, {hashlib.sha256(file.read()).hexdigest()[:12]}"
    except OSError as error:
        found = f"missing ({error.strerror}: {images})"
    return {
        "hardware": hardware_key(device, gpus),
        "GPU driver": str(gpus[0].driver) if gpus else "none",
        "torch": metadata.version("torch"),
        "Python": platform.python_version(),
        "code of ddpperf": code.hexdigest()[:12],
        "file of images": found,
    }


def launcher(template: str) -> str:
    """Return the template of a launcher. Raises ValueError if it is no command that can be used."""
    try:
        words = shlex.split(template)
    except ValueError:  # such as an open quotation
        words = []
    if not words or not set(re.findall(r"\{(\w+)\}", template)) <= set(PLACEHOLDERS):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"takes a command with none but {known}")
    return template
