"""Read a hostfile: the nodes of a run without the first, one host on each line."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from ddpperf.errors import Refused, quoted
from ddpperf.io.files import read_text

# The first letter of a user and of a host is never a dash: ssh would read an option.
LINE = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][\w.-]*)@)?"
    r"(?P<name>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])"
    r"(?::(?P<port>\d{1,5}))?"
    r"(?P<slots>\s+slots=\d{1,5})?",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node to start an agent on. Without a user or a port, ssh chooses its own default."""

    name: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name and self.port is not None else self.name
        return name if self.port is None else f"{name}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Hostfile:
    """The hosts of a hostfile in their order. note: a sentence for the user, or the empty string."""

    hosts: tuple[Host, ...]
    note: str = ""


def read_hostfile(path: Path, nodes: int) -> Hostfile:
    """Read a hostfile for a run on `nodes` nodes, or raise Refused if it does not fit the run.

    Each line is `[user@]host[:port]`. An IPv6 address with a port stands in brackets. A line may end
    with `slots=N`, as Open MPI's hostfiles do: the note then says that ddpperf does not use it. What
    follows a `#` is a comment.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise Refused(f"the hostfile {path} cannot be read ({why}); correct the path or the file") from error
    found = parse_hostfile(text, str(path))
    if len(found.hosts) != nodes - 1:
        raise Refused(
            f"--nodes {nodes} needs {nodes - 1} other hosts, found {len(found.hosts)} in {path}; correct "
            f"the file, which lists all nodes but the first, or pass --nodes {len(found.hosts) + 1}"
        )
    for host in found.hosts:
        if is_own_node(host):
            raise Refused(
                f"the hostfile {path} lists {host}, which is the first node, where pytest runs; "
                "delete its line, as the file lists only the other nodes"
            )
    return found


def parse_hostfile(text: str, source: str) -> Hostfile:
    """Return the hosts that a text lists, or raise Refused with `source` and the line's number."""
    hosts: dict[tuple[str, int | None], Host] = {}
    has_slots = False
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        found = LINE.fullmatch(words)
        port = int(found["port"]) if found and found["port"] else None
        if found is None or (port is not None and not 1 <= port <= 65535):
            raise Refused(
                f"{source}, line {number}: {quoted(words)} is not a host; "
                "write [user@]host[:port] on each line"
            )
        host = Host(name=found["name"].strip("[]"), user=found["user"], port=port)
        if hosts.setdefault((host.name.lower(), port), host) is not host:
            raise Refused(
                f"{source}, line {number}: {host} is listed twice; list each node once, as one agent "
                "starts all ranks of its node"
            )
        has_slots = has_slots or found["slots"] is not None
    if not hosts:
        raise Refused(f"the hostfile {source} lists no host; write [user@]host[:port] on each line")
    note = f"{source}: slots= is not used; --node-size sets the number of ranks per node"
    return Hostfile(hosts=tuple(hosts.values()), note=note if has_slots else "")


def is_own_node(host: Host) -> bool:
    """Return whether a host is the node of this process.

    A host with a port never is: its ssh server can be that of a container on this node.
    """
    if host.port is not None:
        return False
    import psutil  # here, as in ddpperf.machine.network

    own = {
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host.name, None)}
    except (OSError, UnicodeError):
        return False  # ssh's configuration may know the name
    return any(
        address in own or ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found
    )
