"""A GPU as its driver describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as its driver describes it. Values that the driver does not report are None.

    nvlink_bytes_per_second: the nominal rate of all active NVLinks together, in one direction.
    nvlink_ends: the number of active NVLinks by what is at their other end: a GPU's PCI address,
    "switch", "cpu" or "unknown". pcie_generation and pcie_width: the highest that this GPU reaches in
    this machine, since an idle link is slower.
    """

    name: str
    uuid: str
    memory_bytes: int | None
    power_limit_watts: float | None
    nvlinks: int | None
    nvlink_bytes_per_second: float | None
    driver: str | None
    numa_node: int | None
    nvlink_generation: int | None = None
    nvlink_ends: Mapping[str, int] = field(default_factory=dict, hash=False)
    pci_address: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
