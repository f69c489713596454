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


class Nodes:
    """Nodes that run; `names` and `addresses` have an entry for each. All links have one delay and rate."""

    def __init__(
        self, prefix: str, count: int, switch: subprocess.Popen[str], delay_seconds: float, rate: float
    ) -> None:
        self.names = [f"{prefix}{node}" for node in range(count)]
        self.addresses = [f"10.77.0.{node + 1}" for node in range(count)]
        # The template of a launcher that starts each rank in its node.
        variables = "RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={ranks}"
        self.launcher = f"{shutil.which('ip', path=PATH)} netns exec {prefix}{{node}} env {variables}"
        self._switch, self._delay_seconds, self._rate = switch, delay_seconds, rate

    def start(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command in a node, in a process group of its own; `options` are those of Popen."""
        words = [shutil.which("ip", path=PATH) or "ip", "netns", "exec", self.names[node], *command]
        return subprocess.Popen(words, start_new_session=True, text=True, **options)

    def connect(self, node: int, connected: bool = True) -> None:
        """Let a node's frames through in both directions from now on, or drop them."""
        assert self._switch.stdin
        assert self._switch.stdout
        values = [node, self._delay_seconds, self._rate, connected, connected]
        self._switch.stdin.write(f"{json.dumps(values)}\n")
        self._switch.stdin.flush()
        self._switch.stdout.readline()  # the change holds from now on


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
    made = Nodes(prefix, count, switch, delay_seconds, bytes_per_second)
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
            made.connect(node)
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
