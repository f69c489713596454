"""Nodes for tests: Linux network namespaces, joined by a bridge in a namespace of its own.

A node is a namespace with loopback and the interface `eth0`, of the address 10.77.0.1, 10.77.0.2,
and so on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "eth0"
NAME = re.compile(r"ddp(\d+)n\w+")  # of a namespace: the process that made it, and a number
NUMBERS = itertools.count(10)
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def ip(*words: str) -> str:
    """Run the command `ip` and return its output; raise RuntimeError with its complaint."""
    done = subprocess.run(["ip", *words], env={"PATH": PATH}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`ip {' '.join(words)}`: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def namespaces_reason() -> str:
    """Return why this process cannot make nodes, or "" if it can."""
    if not shutil.which("ip", path=PATH):
        return "network namespaces need the command `ip`; install iproute2"
    try:
        with nodes(1):
            return ""
    except RuntimeError as problem:
        return f"network namespaces need root: {problem}"


# Skips a test with the reason where nodes cannot be made; tried when the first such test starts.
needs_namespaces = pytest.mark.usefixtures("namespaces_allowed")


class Nodes:
    """Nodes that run. launcher: the template of a launcher that starts each rank in its node."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        variables = "RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={ranks}"
        self.launcher = f"{shutil.which('ip', path=PATH)} netns exec {prefix}{{node}} env {variables}"

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command in a node, in a process group of its own; `options` are those of Popen."""
        words = [shutil.which("ip", path=PATH) or "ip", "netns", "exec", f"{self._prefix}{node}", *command]
        return subprocess.Popen(words, start_new_session=True, text=True, **options)

    def connect(self, node: int, connected: bool = True) -> None:
        """Let a node's frames through in both directions from now on, or drop them."""
        bridge = ["master", "bridge"] if connected else ["nomaster"]
        ip("-n", f"{self._prefix}s", "link", "set", f"port{node}", *bridge)


@contextlib.contextmanager
def nodes(count: int) -> Iterator[Nodes]:
    """Make nodes, and remove them with all their processes in the end."""
    remove(name for name, maker in _existing().items() if not maker.exists())
    prefix = f"ddp{os.getpid()}n{next(NUMBERS)}x"
    made, switch, names = Nodes(prefix), f"{prefix}s", [f"{prefix}{node}" for node in range(count)]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for node, name in enumerate(names):
            ip("netns", "add", name)
            port = f"-n {switch} link add port{node} type veth peer name {INTERFACE} netns {name}"
            ip(*port.split())
            ip("-n", switch, "link", "set", f"port{node}", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                ip("-n", name, "link", "set", interface, "up")
            made.connect(node)
        yield made
    finally:
        remove([*names, switch])


def _existing() -> dict[str, Path]:
    """Return the namespaces of all nodes, and the process that made each."""
    return {found[0]: Path("/proc", found[1]) for found in NAME.finditer(ip("netns", "list"))}


def remove(names: Iterable[str]) -> None:
    """Kill all processes in namespaces, and remove the namespaces that exist."""
    for name in _existing().keys() & set(names):
        for pid in ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", name)
