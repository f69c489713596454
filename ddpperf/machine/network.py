"""Find the network interfaces of this node, their addresses and the rates of their links."""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from ddpperf.errors import Refused

INFINIBAND = Path("/sys/class/infiniband")
ANYWHERE = ("192.0.2.1", 9)  # an address for documentation (RFC 5737): no packet is sent to it


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up, and its first IPv4 address, or else its first IPv6 address.

    link: the kind and the rate of the link, such as "ib400" or "eth10" in Gbit/s, or the name of
    the interface if the kernel knows no rate. bytes_per_second: the link's nominal rate in one
    direction, or None.
    """

    name: str
    address: str
    link: str
    bytes_per_second: float | None = None

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.") or self.address == "::1"


def interfaces() -> list[Interface]:
    """Return the network interfaces that are up and have an address."""
    import psutil  # here, as runs on one node do not need it, and its import takes 10 ms

    states, found = psutil.net_if_stats(), []
    for name, addresses in psutil.net_if_addrs().items():
        usable = [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in addresses
            if entry.family == family and not entry.address.startswith("fe80:")
        ]
        if usable and name in states and states[name].isup:
            link, rate = _link(name, states[name].speed)
            found.append(Interface(name=name, address=usable[0], link=link, bytes_per_second=rate))
    return found


def find_interface(requested: str | None) -> Interface:
    """Return the interface with this name or address; without a request, that of the default route.

    Raises Refused if there is no such interface.
    """
    up = interfaces()
    wanted = _source_address(ANYWHERE) if requested is None else requested
    for one in up:
        if wanted in (one.name, one.address):
            return one
    names = ", ".join(f"{one.name} ({one.address})" for one in up) or "none"
    problem = (
        "the network has no default route" if requested is None else f"--interface {requested} is not up"
    )
    raise Refused(f"{problem}, found the network interfaces {names}; name one with --interface")


def interface_to(address: str) -> Interface | None:
    """Return the interface through which this node sends to `address`, or None."""
    mine = _source_address((address, ANYWHERE[1]))
    return next((one for one in interfaces() if one.address == mine), None)


def _source_address(to: tuple[str, int]) -> str | None:
    family = socket.AF_INET6 if ":" in to[0] else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(to)  # a datagram socket: the kernel chooses a route, and sends nothing
        return str(probe.getsockname()[0])
    return None


def _link(name: str, megabits: int) -> tuple[str, float | None]:
    """Return the kind and rate of an interface's link, and its bytes per second or None."""
    with contextlib.suppress(OSError, IndexError):  # not an RDMA card
        device = next((Path("/sys/class/net") / name / "device" / "infiniband").iterdir()).name
        rate = (INFINIBAND / device / "ports" / "1" / "rate").read_text()  # "400 Gb/sec (4X NDR)"
        gigabits = float(re.findall(r"[\d.]+", rate)[0])
        kind = (INFINIBAND / device / "ports" / "1" / "link_layer").read_text().strip()
        return f"{'ib' if kind == 'InfiniBand' else 'eth'}{gigabits:g}", gigabits * 1e9 / 8
    if name == "lo" or megabits <= 0:
        return name, None
    return f"eth{megabits / 1e3:g}", megabits * 1e6 / 8


def listen(address: str) -> socket.socket:
    """Listen on a free port of the network interface with this address, and of no other one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)
