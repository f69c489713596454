"""What must be equal on all nodes of a run, so that their times can stand in one table."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import ddpperf
from ddpperf.errors import Refused, short
from ddpperf.machine.git import commit
from ddpperf.machine.hardware import Gpu, hardware_key

Facts = Mapping[str, str]

PROTOCOL = "1"  # of the messages between a controller and an agent
PACKAGE = Path(ddpperf.__file__).parent


def facts(device: str, gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the facts of this node that must equal those of the first node, by their names.

    device: "cuda" or "cpu". gpus: all GPUs of this node that are visible.
    """
    return {
        "protocol": PROTOCOL,
        "hardware": hardware_key(device, gpus),
        "GPU driver": str(gpus[0].driver) if device == "cuda" and gpus else "none",
        "torch": _version("torch"),
        "Python": platform.python_version(),
        "commit of ddpperf": commit(PACKAGE.parent),
        "code of ddpperf": code_digest(),
    }


def require_equal(name: str, found: Facts, expected: Facts) -> None:
    """Raise Refused with the first difference between a node's facts and those of the first node."""
    for fact, value in expected.items():
        if (other := found.get(fact, "unknown")) != value:
            what = f"{fact} on node {name} is {short(str(other))}, on the first node {value}"
            raise Refused(f"{what}; all nodes of a run must be equal, so change one of the two nodes")


def machine_id() -> str:
    """Return an identifier of this machine, which changes at each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@cache
def code_digest() -> str:
    """Return a digest of the Python files of the ddpperf that this process runs."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version(package: str) -> str:
    """Return the version of an installed package without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
