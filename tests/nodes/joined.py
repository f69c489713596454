"""A run of two nodes for tests: a controller in this process, and real agents on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddpperf.machine.network import Interface, find_interface
from ddpperf.node.facts import facts, machine_id
from ddpperf.node.handshake import make_key, read_key
from ddpperf.node.joining import Joining
from ddpperf.workers.interpreter import Side
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import Nodes, SetOptions
from tests.project import REPOSITORY

LOOPBACK: Interface = find_interface("lo")
JOIN_SECONDS = 60


def listen(folder: Path, interface: Interface = LOOPBACK, **arguments: Any) -> Joining:
    """Let agents with the key folder/node.key join a run on the CPU with one rank on each node."""
    make_key(key := folder / "node.key")
    usual = {
        "count": 2,
        "expected": facts("cpu", []),
        "welcome": {"device": "cpu", "ranks": 1, "data": "synthetic", "machine": machine_id()},
        "digest": "",
    }
    return Joining(interface, 0, read_key(key), **{**usual, **arguments})


class Run:
    """A controller that waits for agents, and the agents that were started for it."""

    def __init__(self, folder: Path, *, cwd: Path = REPOSITORY, **arguments: Any) -> None:
        self.folder, self.key, self.cwd = folder, folder / "node.key", cwd
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.joining = listen(folder, **arguments)

    def start(self, name: str = "b", *more: str) -> subprocess.Popen[str]:
        """Start an agent, which joins soon."""
        command = [sys.executable, "-m", "ddpperf.node", "--join", f"127.0.0.1:{self.joining.port}"]
        self.agents[name] = subprocess.Popen(
            [*command, "--key", str(self.key), "--name", name, "--seconds", "10", *more],
            cwd=self.cwd,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "DDPPERF_LOCK_FOLDER": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.agents[name]

    def wait(self) -> None:
        self.joining.wait(JOIN_SECONDS, lambda line: None)

    def pool(self, size: int = 2, sides: Sequence[Side] = (Side(),), **options: Any) -> Pool:
        """Return a pool whose process sets have one rank on each node."""
        nodes = Nodes(others=self.joining.nodes, node_size=1, interface="lo")
        options = {"device": "cpu", "rounds": 2, "deadline_seconds": 30.0, **options}
        return Pool(SetOptions(size=size, nodes=nodes, **options), sides=sides)

    def close(self) -> None:
        self.joining.close()
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                agent.send_signal(signal.SIGCONT)
            try:
                agent.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.communicate()


@contextlib.contextmanager
def run_of(folder: Path, **arguments: Any) -> Iterator[Run]:
    run = Run(folder, **arguments)
    try:
        yield run
    finally:
        run.close()
