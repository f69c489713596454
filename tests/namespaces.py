"""Nodes for tests: Linux network namespaces, joined by a switch with a delay and a rate.

A node is a namespace with loopback and the interface `eth0`, of the address 10.77.0.1, 10.77.0.2,
and so on. The switch is a process (tests/network_switch.py), because some kernels have no netem.
Delay and rate belong to a node's outgoing frames. The rate counts the bytes of Ethernet frames.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "eth0"
MTU = 9000  # bytes of an Ethernet frame without its header of 14: jumbo frames, as in clusters
NAME = re.compile(r"ddp(\d+)n\d+")  # of a namespace: the process that made it, and a number
NUMBERS = itertools.count(10)
SWITCH = Path(__file__).with_name("network_switch.py")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# What a cluster's administrator sets: buffers for rate times delay, and full speed after a pause.
SYSCTLS = {
    "ipv4/tcp_congestion_control": "reno",  # every namespace may use it, and nothing is lost here
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_rmem": "4096 4194304 33554432",
    "ipv4/tcp_wmem": "4096 4194304 33554432",
}


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
    except (OSError, RuntimeError) as problem:
        return f"network namespaces need root and /dev/net/tun: {problem}"


# Skips a test with the reason where nodes cannot be made; tried when the first such test starts.
needs_namespaces = pytest.mark.usefixtures("namespaces_allowed")


CANNOT_MOUNT = "mount namespaces need root, or a kernel that allows them to users"
_MOUNT = 'mount -t tmpfs -o size="$1" none "$2"; shift 2; exec "$@"'


@functools.cache
def can_mount() -> bool:
    """Return whether this process may give a command mounts of its own."""
    try:
        return (
            subprocess.run([*mounted(Path("/dev/shm"), "64k"), "true"], capture_output=True).returncode == 0
        )
    except OSError:
        return False


def mounted(folder: Path, size: str) -> list[str]:
    """Return a command that runs the command after it with an empty disk of a size at `folder`.

    Other processes do not see that disk.
    """
    flags = "-m" if os.geteuid() == 0 else "-rm"
    return ["unshare", flags, "sh", "-ec", _MOUNT, "sh", size, str(folder)]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A node's link: one-way delay, rate per direction, and whether frames leave and arrive."""

    delay_seconds: float = 0.0
    bytes_per_second: float = 1e12
    outgoing: bool = True
    incoming: bool = True


class Nodes:
    """Nodes that run; `names`, `addresses` and `links` have an entry for each."""

    def __init__(self, prefix: str, count: int, switch: subprocess.Popen[str]) -> None:
        self.names = [f"{prefix}{node}" for node in range(count)]
        self.addresses = [f"10.77.0.{node + 1}" for node in range(count)]
        self.links = [Link()] * count
        # The template of a launcher that starts each rank in its node.
        variables = "RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={ranks}"
        self.launcher = f"{shutil.which('ip', path=PATH)} netns exec {prefix}{{node}} env {variables}"
        self._switch = switch

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command in a node, in a process group of its own; `options` are those of Popen."""
        words = [shutil.which("ip", path=PATH) or "ip", "netns", "exec", self.names[node], *command]
        return subprocess.Popen(words, start_new_session=True, text=True, **options)

    def change(self, node: int, **changes: Any) -> None:
        """Change fields of a node's link, from the next frame on."""
        self.links[node] = link = replace(self.links[node], **changes)
        values = [node, link.delay_seconds, link.bytes_per_second, link.outgoing, link.incoming]
        assert self._switch.stdin
        assert self._switch.stdout
        self._switch.stdin.write(f"{json.dumps(values)}\n")
        self._switch.stdin.flush()
        self._switch.stdout.readline()  # the change holds from now on

    def cut(self, node: int, *, outgoing: bool = True, incoming: bool = True) -> None:
        """Drop a node's frames in one direction or in both; frames on their way may still arrive."""
        self.change(node, outgoing=not outgoing, incoming=not incoming)

    def restore(self, node: int) -> None:
        """Let a node's frames through again."""
        self.change(node, outgoing=True, incoming=True)


@contextlib.contextmanager
def nodes(count: int, *, delay_seconds: float = 0.0, bytes_per_second: float = 1e12) -> Iterator[Nodes]:
    """Make nodes, and remove them with all their processes in the end."""
    remove(name for name, maker in _existing().items() if not maker.exists())
    prefix = f"ddp{os.getpid()}n{next(NUMBERS)}"
    switch = subprocess.Popen(
        [sys.executable, "-ES", str(SWITCH), prefix, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C does not reach it before the nodes
    )
    made = Nodes(prefix, count, switch)
    try:
        assert switch.stdout
        if not switch.stdout.readline():
            complaint = switch.communicate()[1].strip().splitlines()
            raise RuntimeError(f"the switch did not start: {complaint[-1]}")
        for node, name in enumerate(made.names):
            ip("netns", "add", name)
            ip("link", "set", name, "netns", name, "name", INTERFACE)
            ip("-n", name, "addr", "add", f"{made.addresses[node]}/24", "dev", INTERFACE)
            mac = f"02:00:00:00:00:{node:02x}"
            frames = f"mtu {MTU} gso_max_size {2 * MTU}"
            ip(*f"-n {name} link set {INTERFACE} address {mac} {frames} up".split())
            ip("-n", name, "link", "set", "lo", "up")
            settings = "; ".join(f'echo "{value}" > /proc/sys/net/{key}' for key, value in SYSCTLS.items())
            ip("netns", "exec", name, "sh", "-ec", settings)
            made.change(node, delay_seconds=delay_seconds, bytes_per_second=bytes_per_second)
        yield made
    finally:
        remove(made.names)
        switch.kill()
        switch.communicate()


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
