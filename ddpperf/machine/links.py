"""The rates of the links between devices: nominal by NVLink and PCIe generation, or measured.

All rates are bytes per second in one direction. An all-reduce reaches about 80% of NVLink's nominal
rate, because the packets of NVLink have headers (github.com/NVIDIA/nccl/issues/1054).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ddpperf.analysis.statistics import relative_iqr
from ddpperf.machine.child_process import run_child
from ddpperf.results import units

if TYPE_CHECKING:
    from ddpperf.machine.hardware import Gpu
    from ddpperf.machine.network import Interface

# The NVLink generation and the rate of one NVLink, by a part of the GPU's name. Source: NVIDIA's data
# sheets, which give the sum of all links in both directions: P100 160 GB/s of 4 links, V100 300 of 6,
# A100 600 of 12, H100 and H200 900 of 18, B200 and B300 1,800 of 18. A800, H20 and H800 have the
# links of A100 and H100, and A800 and H800 have fewer links. GA102's white paper: 14.0625 GB/s. A40,
# A4500, A5000, A5500, A6000 and RTX 3090 have this chip, and 112.5 GB/s of 4 links.
NVLINKS = {
    "P100": (1, 20e9),
    "V100": (2, 25e9),
    **dict.fromkeys(("A100", "A800"), (3, 25e9)),
    **dict.fromkeys(("A40", "A4500", "A5000", "A5500", "A6000", "RTX 3090"), (3, 14.0625e9)),
    **dict.fromkeys(("H100", "H200", "H800", "H20"), (4, 25e9)),
    **dict.fromkeys(("B200", "B300"), (5, 50e9)),
}
NVLINK_RATES = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}  # of one NVLink, by generation
# The generation by what nvmlDeviceGetNvLinkVersion returns: the numbers of nvml.h's enumeration
# NVML_NVLINK_VERSION_*, in which 5 is version 3.1 (github.com/open-mpi/hwloc/issues/658). Drivers
# report version 5.0 of some Hopper GPUs, too, so a name in NVLINKS counts more.
NVML_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}
# One PCIe lane by generation. Source: 2.5, 5, 8, 16, 32 and 64 GT/s, less the coding, which is 8 of
# 10 bits for generations 1 and 2, 128 of 130 bits for 3 to 5, and 242 of 256 bytes for 6.
PCIE_LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
SWITCH, CPU, UNKNOWN = "switch", "cpu", "unknown"  # other ends of NVLinks that are no known GPU
LOOPBACK_COPY = Path(__file__).with_name("loopback_copy.py")
LOOPBACK_SECONDS = 20.0  # the copies take 0.3 s


class RateKind(StrEnum):
    """Where the rate of a link comes from."""

    GIVEN = "given"
    NOMINAL = "nominal"
    MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """The rate at which a device can send to the others, in one direction.

    source: the link, such as "NVLink 4, 18 x 25 GB/s". spread: the interquartile range of the copies
    over their median; None for a rate that was not measured.
    """

    bytes_per_second: float
    source: str
    kind: RateKind
    spread: float | None = None

    def __str__(self) -> str:
        """Return the rate and its source, such as "63 GB/s (nominal, PCIe 5.0 x16)"."""
        spread = "" if self.spread is None else f", IQR {self.spread:.0%}"
        return f"{units.bandwidth(self.bytes_per_second)} ({self.kind}, {self.source}{spread})"


class LinkRates:
    """Finds the link rate of each number of devices in a run, and keeps which rates were used.

    gpus: the GPUs in the order of the ranks, or none for ranks on the CPU. given: the rate of
    --link-bandwidth in bytes per second. node_size: the number of devices of each node; None if all
    devices are in one machine. between: the rate of the link between two nodes, or None if unknown.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu] | None,
        given: float | None = None,
        *,
        node_size: int | None = None,
        between: LinkRate | None = None,
    ) -> None:
        self._gpus = gpus
        self._given = given
        self._node_size = node_size
        self._between = between
        self._cores = tuple(sorted(os.sched_getaffinity(0)))  # before this process is pinned
        self._used: dict[int, LinkRate | None] = {}

    def of(self, world_size: int) -> LinkRate | None:
        """Return the rate of the link that the first `world_size` devices share, or None if unknown.

        Across nodes, this is the rate of a whole node's link, not a device's part of it. In a flat
        ring, consecutive ranks are on one node, so each node sends the bytes of one rank: 2(N-1)/N
        times the buffer. Their rate is busbw as in nccl-tests, and the link is its upper bound.

        The loopback of the CPU is measured at the first call.
        """
        if world_size not in self._used:
            self._used[world_size] = self._find(world_size)
        return self._used[world_size]

    def cross_nodes(self, world_size: int) -> bool:
        """Return whether the link of so many devices is the one between nodes."""
        return self._node_size is not None and world_size > self._node_size

    def _find(self, world_size: int) -> LinkRate | None:
        if world_size < 2:
            return None
        if self.cross_nodes(world_size):
            return self._between
        if self._given is not None:
            return LinkRate(bytes_per_second=self._given, source="--link-bandwidth", kind=RateKind.GIVEN)
        return loopback(self._cores) if self._gpus is None else gpu_link(self._gpus[:world_size])

    def to_json(self) -> list[dict[str, Any]]:
        """Return the used rates, each with the numbers of devices that it belongs to."""
        sizes: dict[LinkRate, list[int]] = {}
        for world_size, rate in self._used.items():
            if rate is not None:
                sizes.setdefault(rate, []).append(world_size)
        return [{"world_sizes": sorted(those)} | asdict(rate) for rate, those in sizes.items()]


def rates_in_words(stored: Sequence[Mapping[str, Any]]) -> str:
    """Return the stored link rates of a run as text, with the numbers of devices if they differ."""
    texts = []
    for fields in stored:
        rate = LinkRate(**{name: value for name, value in fields.items() if name != "world_sizes"})
        devices = f" of {', '.join(map(str, fields['world_sizes']))} devices" if len(stored) > 1 else ""
        texts.append(f"link{devices} {rate}")
    return "; ".join(texts)


# --- nodes


def link_between(
    interface: Interface, node_size: int, device_bytes_per_second: float | None
) -> LinkRate | None:
    """Return the rate of the link between two nodes, or None if unknown.

    interface: this node's network interface, whose nominal rate counts. node_size: the number of
    devices of a node. device_bytes_per_second: the rate of --node-link, which is the rate of
    each device of a node to other nodes. It overrides the nominal rate.
    """
    if device_bytes_per_second is not None:
        of = f" of {node_size} devices" if node_size > 1 else ""
        rate = node_size * device_bytes_per_second
        return LinkRate(bytes_per_second=rate, source=f"--node-link{of}", kind=RateKind.GIVEN)
    if interface.bytes_per_second is None:
        return None
    source = f"{interface.link} between nodes"
    return LinkRate(bytes_per_second=interface.bytes_per_second, source=source, kind=RateKind.NOMINAL)


# --- GPUs


def nvlink(name: str, version: int | None) -> tuple[int | None, float | None]:
    """Return the generation and the rate of one NVLink of a GPU; None for what is not known.

    name: the GPU's name. version: what nvmlDeviceGetNvLinkVersion returned, if anything.
    """
    for part, known in NVLINKS.items():
        if part in name:
            return known
    generation = NVML_GENERATIONS.get(version or 0)
    return generation, NVLINK_RATES.get(generation or 0)


def data_rate(megabytes_per_second: int) -> float:
    """Convert an NVLink's line rate in MB/s to its data rate in bytes/s, both for one direction.

    For NVLink 2, 4 and 5 the line rate includes coding and error correction.
    """
    return {25781: 25e9, 26562: 25e9, 53125: 50e9}.get(megabytes_per_second, megabytes_per_second * 1e6)


def pcie_rate(generation: int | None, width: int | None) -> float | None:
    """Return the rate of a PCIe link with so many lanes, or None if it is not known."""
    lane = PCIE_LANE_RATES.get(generation or 0)
    return width * lane if width and lane else None


def gpu_link(gpus: Sequence[Gpu]) -> LinkRate | None:
    """Return the nominal rate at which a GPU can send to the other GPUs, or None if unknown.

    NVLinks count if they join all of these GPUs, directly or by a switch. Otherwise PCIe counts. The
    slowest GPU decides. One GPU alone has no link.
    """
    if len(gpus) < 2:
        return None
    if _joined(gpus):
        rates = [_nvlink_rate(gpu, gpus) for gpu in gpus]
        return min(rates, key=_rate) if all(rates) else None
    return min((_pcie_rate(gpu) for gpu in gpus), key=_rate)


def _rate(link: LinkRate | None) -> float:
    return 0.0 if link is None else link.bytes_per_second


def _nvlink_rate(gpu: Gpu, gpus: Sequence[Gpu]) -> LinkRate | None:
    """Return the rate of a GPU's NVLinks to these GPUs."""
    if not gpu.nvlinks or gpu.nvlink_bytes_per_second is None:
        return None
    addresses = {other.pci_address for other in gpus}
    links = sum(count for end, count in _ends(gpu).items() if end in (SWITCH, UNKNOWN) or end in addresses)
    each = gpu.nvlink_bytes_per_second / gpu.nvlinks
    generation = "" if gpu.nvlink_generation is None else f" {gpu.nvlink_generation}"
    return LinkRate(
        bytes_per_second=links * each,
        source=f"NVLink{generation}, {links} x {units.bandwidth(each)}",
        kind=RateKind.NOMINAL,
    )


def _pcie_rate(gpu: Gpu) -> LinkRate | None:
    if (rate := pcie_rate(gpu.pcie_generation, gpu.pcie_width)) is None:
        return None
    source = f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}"
    return LinkRate(bytes_per_second=rate, source=source, kind=RateKind.NOMINAL)


def _ends(gpu: Gpu) -> Mapping[str, int]:
    """Return the numbers of a GPU's NVLinks by their other ends, which old stored GPUs lack."""
    return gpu.nvlink_ends or ({UNKNOWN: gpu.nvlinks} if gpu.nvlinks else {})


def _joined(gpus: Sequence[Gpu]) -> bool:
    """Return whether NVLinks lead from each GPU to all others, also through other GPUs."""
    reached, others = [gpus[0]], list(gpus[1:])
    while near := [gpu for gpu in others if any(_are_linked(gpu, known) for known in reached)]:
        reached += near
        others = [gpu for gpu in others if gpu not in near]
    return not others


def _are_linked(one: Gpu, other: Gpu) -> bool:
    switched = all({SWITCH, UNKNOWN} & _ends(gpu).keys() for gpu in (one, other))
    return switched or other.pci_address in _ends(one)


# --- the loopback of the CPU


@cache
def loopback(cores: tuple[int, ...]) -> LinkRate | None:
    """Measure the rate of a copy through a TCP socket on 127.0.0.1 between two processes.

    cores: the CPU cores that the two processes may use. The rate is the median of several copies. The
    result is None if the machine has no loopback.
    """
    command = [sys.executable, "-I", "-S", str(LOOPBACK_COPY), json.dumps(cores)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):
        rates = [float(rate) for rate in json.loads(run_child(command, {}, LOOPBACK_SECONDS).stdout)]
        return LinkRate(
            bytes_per_second=median(rates),
            source=f"loopback, {len(rates)} copies",
            kind=RateKind.MEASURED,
            spread=relative_iqr(rates),
        )
    return None
