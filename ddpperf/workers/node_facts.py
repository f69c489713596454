"""The facts that must be equal on all nodes of a run, so that their times can be compared."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import ddpperf
from ddpperf.errors import Refused, short
from ddpperf.machine.hardware import hardware_key, visible_gpus

PACKAGE = Path(ddpperf.__file__).parent
COMPARED_BYTES = 2**20  # at the beginning and at the end of the file of images


def node_facts(device: str, images: str) -> dict[str, str]:
    """Return the facts of this node that must equal those of the controller's node.

    device: "cuda" or "cpu". images: the file of decoded images, or "" for synthetic images.
    """
    gpus = visible_gpus() if device == "cuda" else []
    return {
        "hardware": hardware_key(device, gpus),
        "GPU driver": str(gpus[0].driver) if gpus else "none",
        "torch": _version("torch"),
        "Python": platform.python_version(),
        "code of ddpperf": code_digest(),
        "file of images": _digest_of_ends(images),
    }


def require_equal(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise Refused with the first difference between a node's facts and those of the controller's node."""
    for fact, value in expected.items():
        if (other := found.get(fact, "unknown")) != value:
            what = f"{fact} on node {name} is {short(str(other))}, where pytest runs it is {value}"
            raise Refused(f"{what}; all nodes of a run must be equal, so change one of the two nodes")


def machine_id() -> str:
    """Return an identifier of this machine and its process ids, which changes at each boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


@cache
def code_digest() -> str:
    """Return a digest of the Python files of the ddpperf that this process runs."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _digest_of_ends(images: str) -> str:
    """Return a file's size and a digest of its beginning and end, since it may hold many GB."""
    if not images:
        return "none"
    try:
        with open(images, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            content = file.read(COMPARED_BYTES)
            file.seek(max(0, size - COMPARED_BYTES))
            content += file.read(COMPARED_BYTES)
    except OSError as error:
        return f"missing ({error.strerror}: {images})"
    return f"{size} bytes, {hashlib.sha256(content).hexdigest()[:12]}"


def _version(package: str) -> str:
    """Return the version of an installed package without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
