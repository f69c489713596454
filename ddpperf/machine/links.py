"""The nominal rates of the links between GPUs.

All rates are bytes per second in one direction. An all-reduce reaches about 80% of NVLink's nominal
rate, because the packets of NVLink have headers (github.com/NVIDIA/nccl/issues/1054).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpperf.analysis.gpu_data_sheets import nvlink
from ddpperf.machine.gpu_description import SWITCH, UNKNOWN, Gpu
from ddpperf.results import units

# One PCIe lane by generation. Source: 2.5, 5, 8, 16, 32 and 64 GT/s, less the coding, which is 8 of
# 10 bits for generations 1 and 2, 128 of 130 bits for 3 to 5, and 242 of 256 bytes for 6.
PCIE_LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


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
        return f"{units.bandwidth(self.bytes_per_second)} ({self.kind}, {self.source})"


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
        rate = LinkRate(**{name: fields[name] for name in ("bytes_per_second", "source", "kind")})
        texts.append(f"link{devices} {rate}")
    return "; ".join(texts)


def gpu_link(gpus: Sequence[Gpu]) -> LinkRate | None:
    """Return the nominal rate at which a GPU can send to the other GPUs, or None if unknown.

    NVLinks count if they join all of these GPUs, directly or by a switch. Otherwise PCIe counts. The
    slowest GPU decides. One GPU alone has no link.
    """
    if len(gpus) < 2:
        return None
    joined = _are_joined(gpus)
    rates = [_nvlink_rate(gpu, gpus) if joined else _pcie_rate(gpu) for gpu in gpus]
    known = [rate for rate in rates if rate is not None]
    return min(known, key=lambda rate: rate.bytes_per_second) if len(known) == len(gpus) else None


def _are_joined(gpus: Sequence[Gpu]) -> bool:
    """Return whether NVLinks connect each GPU to all others, directly or through other GPUs."""
    reached = [gpus[0]]
    for known in reached:  # grows meanwhile
        reached += [gpu for gpu in gpus if gpu not in reached and _are_linked(gpu, known)]
    return len(reached) == len(gpus)


def _are_linked(one: Gpu, other: Gpu) -> bool:
    switched = all({SWITCH, UNKNOWN} & gpu.nvlink_ends.keys() for gpu in (one, other))
    return switched or other.pci_address in one.nvlink_ends


def _nvlink_rate(gpu: Gpu, gpus: Sequence[Gpu]) -> LinkRate | None:
    """Return the rate of a GPU's NVLinks to these GPUs."""
    generation, each = nvlink(gpu.name)
    if each is None:
        return None
    ends = {SWITCH, UNKNOWN, *(other.pci_address for other in gpus)}
    links = sum(count for end, count in gpu.nvlink_ends.items() if end in ends)
    source = f"NVLink {generation}, {links} x {units.bandwidth(each)}"
    return LinkRate(bytes_per_second=links * each, source=source)


def _pcie_rate(gpu: Gpu) -> LinkRate | None:
    lane = PCIE_LANE_RATES.get(gpu.pcie_generation or 0)
    if lane is None or not gpu.pcie_width:
        return None
    source = f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}"
    return LinkRate(bytes_per_second=gpu.pcie_width * lane, source=source)
