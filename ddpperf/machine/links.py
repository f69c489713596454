"""The nominal rates of the links between GPUs and between nodes.

All rates are bytes per second in one direction. An all-reduce reaches about 80% of NVLink's nominal
rate, because the packets of NVLink have headers (github.com/NVIDIA/nccl/issues/1054).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ddpperf.results import units

if TYPE_CHECKING:
    from ddpperf.machine.gpu_description import Gpu
    from ddpperf.machine.network import Interface

# Parts of the names of GPUs, with the generation and the rate of one NVLink. Source: NVIDIA's data
# sheets, which give the sum of all links in both directions, such as 900 GB/s for 18 links of an H200.
# GA102's white paper: 14.0625 GB/s. Drivers report rates with coding and error correction, and version
# 5.0 for some GPUs with NVLink 4.
NVLINKS = {
    ("P100",): (1, 20e9),
    ("V100", "TITAN RTX", "Quadro RTX"): (2, 25e9),
    ("A100", "A800", "A30"): (3, 25e9),
    ("A40", "A4500", "A5000", "A5500", "A6000", "RTX 3090"): (3, 14.0625e9),
    ("H100", "H200", "H800", "H20"): (4, 25e9),
    ("B100", "B200", "B300"): (5, 50e9),
}
# One PCIe lane by generation. Source: 2.5, 5, 8, 16, 32 and 64 GT/s, less the coding, which is 8 of
# 10 bits for generations 1 and 2, 128 of 130 bits for 3 to 5, and 242 of 256 bytes for 6.
PCIE_LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
SWITCH, CPU, UNKNOWN = "switch", "cpu", "unknown"  # other ends of NVLinks that are no known GPU


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """The rate at which a device can send to the others, in one direction.

    source: the link, such as "NVLink 4, 18 x 25 GB/s". kind: "nominal", or "given" by the user.
    """

    bytes_per_second: float
    source: str
    kind: str = "nominal"

    def __str__(self) -> str:
        """Return the rate and its source, such as "63 GB/s (nominal, PCIe 5.0 x16)"."""
        return _in_words(asdict(self))


def _in_words(fields: Mapping[str, Any]) -> str:
    # runs of older versions measured the loopback of CPUs, with a spread
    spread = f", IQR {fields['spread']:.0%}" if fields.get("spread") is not None else ""
    return f"{units.bandwidth(fields['bytes_per_second'])} ({fields['kind']}, {fields['source']}{spread})"


def rates_to_json(rates: Mapping[int, LinkRate | None]) -> list[dict[str, Any]]:
    """Return each different link rate once, with the numbers of devices to which it applies."""
    sizes: dict[LinkRate, list[int]] = {}
    for world_size, rate in rates.items():
        if rate is not None:
            sizes.setdefault(rate, []).append(world_size)
    return [{"world_sizes": sorted(those)} | asdict(rate) for rate, those in sizes.items()]


def rates_in_words(stored: Sequence[Mapping[str, Any]]) -> str:
    """Return the stored link rates of a run as text, with the numbers of devices if they differ."""
    texts = []
    for fields in stored:
        devices = f" of {', '.join(map(str, fields['world_sizes']))} devices" if len(stored) > 1 else ""
        texts.append(f"link{devices} {_in_words(fields)}")
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
        return LinkRate(bytes_per_second=rate, source=f"--node-link{of}", kind="given")
    if interface.bytes_per_second is None:
        return None
    source = f"{interface.link} between nodes"
    return LinkRate(bytes_per_second=interface.bytes_per_second, source=source)


# --- GPUs


def nvlink(name: str) -> tuple[int | None, float | None]:
    """Return the generation and the rate of one NVLink of a GPU with this name, or None for both."""
    known = (nvlink for names, nvlink in NVLINKS.items() if any(part in name for part in names))
    return next(known, (None, None))


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
    ends = {SWITCH, UNKNOWN, *(other.pci_address for other in gpus)}
    links = sum(count for end, count in _ends(gpu).items() if end in ends)
    each = gpu.nvlink_bytes_per_second / gpu.nvlinks
    generation = "" if gpu.nvlink_generation is None else f" {gpu.nvlink_generation}"
    return LinkRate(
        bytes_per_second=links * each,
        source=f"NVLink{generation}, {links} x {units.bandwidth(each)}",
    )


def _pcie_rate(gpu: Gpu) -> LinkRate | None:
    lane = PCIE_LANE_RATES.get(gpu.pcie_generation or 0)
    if lane is None or not gpu.pcie_width:
        return None
    source = f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}"
    return LinkRate(bytes_per_second=gpu.pcie_width * lane, source=source)


def _ends(gpu: Gpu) -> Mapping[str, int]:
    """Return how many NVLinks a GPU has to each other end, with UNKNOWN ends in old stored runs."""
    return gpu.nvlink_ends or ({UNKNOWN: gpu.nvlinks} if gpu.nvlinks else {})


def _joined(gpus: Sequence[Gpu]) -> bool:
    """Return whether NVLinks lead from each GPU to all others, also through other GPUs."""
    reached = [gpus[0]]
    for known in reached:  # grows meanwhile
        reached += [gpu for gpu in gpus if gpu not in reached and _are_linked(gpu, known)]
    return len(reached) == len(gpus)


def _are_linked(one: Gpu, other: Gpu) -> bool:
    switched = all({SWITCH, UNKNOWN} & _ends(gpu).keys() for gpu in (one, other))
    return switched or other.pci_address in _ends(one)
