"""Find the network interfaces of this node, their addresses and the rates of their links."""

from __future__ import annotations

import contextlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from ddpperf.errors import Refused

INFINIBAND = Path("/sys/class/infiniband")
ANYWHERE = "192.0.2.1"  # an address for documentation (RFC 5737): no packet is sent to it


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up, and its first IPv4 address.

    link: the kind and the rate of the link, such as "ib400" or "eth10" in Gbit/s, or the name of
    the interface if the kernel knows no rate. bytes_per_second: the link's nominal rate in one
    direction, or None.
    """

    name: str
    address: str
    link: str
    bytes_per_second: float | None = None


def interfaces() -> list[Interface]:
    """Return the network interfaces that are up and have an IPv4 address."""
    import psutil  # here, as runs on one node do not need it, and its import takes 10 ms

    states, found = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if addresses and name in states and states[name].isup:
            link, rate = _link(name, states[name].speed)
            found.append(Interface(name=name, address=addresses[0], link=link, bytes_per_second=rate))
    return found


def find_interface(requested: str | None) -> Interface:
    """Return the interface with the requested name or address; for None, that of the default route.

    Raises Refused if there is no such interface.
    """
    up = interfaces()
    named = (one for one in up if requested in (one.name, one.address))
    if (found := interface_to(ANYWHERE) if requested is None else next(named, None)) is not None:
        return found
    names = ", ".join(f"{one.name} ({one.address})" for one in up) or "none"
    what = f"--interface {requested} is not up" if requested else "the network has no default route"
    raise Refused(f"{what}, found the network interfaces {names}; name one with --interface")


def interface_to(address: str) -> Interface | None:
    """Return the interface through which this node sends to `address`, or None."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # a datagram socket: the kernel chooses a route, and sends nothing
        mine = probe.getsockname()[0]
        return next((one for one in interfaces() if one.address == mine), None)
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
