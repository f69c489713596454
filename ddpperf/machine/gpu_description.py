"""The GPUs as their driver describes them by its library NVML. CUDA is never initialised here."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pynvml

SWITCH, UNKNOWN = "switch", "unknown"  # other ends of NVLinks that are no known GPU
P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py defines wrongly, as a tuple


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as its driver describes it. Values that the driver does not report are None.

    nvlink_ends: the number of active NVLinks by what is at their other end: a GPU's PCI address,
    "switch" or "unknown". pcie_generation and pcie_width: the highest that this GPU reaches in
    this machine, since an idle link is slower.
    """

    name: str
    uuid: str
    memory_bytes: int | None
    power_limit_watts: float | None
    driver: str | None
    numa_node: int | None
    nvlink_ends: Mapping[str, int] = field(default_factory=dict, hash=False)
    pci_address: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None


def load_nvml() -> bool:
    """Load the driver's library NVML, and return whether the driver answers."""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()  # never shut down, since loading NVML takes long
        return True
    return False


def ask(function: Callable[..., Any], *arguments: Any) -> Any | None:
    """Return the answer of one of NVML's functions, or None if the driver refuses."""
    with contextlib.suppress(pynvml.NVMLError):
        return function(*arguments)
    return None


def gpu_handles(gpus: Sequence[Gpu]) -> list[Any]:
    """Return NVML's handle of each GPU, or None for a GPU that was lost."""
    return [ask(pynvml.nvmlDeviceGetHandleByUUID, gpu.uuid) for gpu in gpus]


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, in the order in which CUDA numbers them."""
    if not load_nvml():
        return []
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return select_visible([_describe(handle) for handle in handles], os.environ.get("CUDA_VISIBLE_DEVICES"))


def select_visible(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES selects, in the order of the value.

    As in CUDA, GPUs after an unknown one are hidden.
    """
    if visible is None:
        return list(gpus)
    selected: list[Gpu] = []
    for word in (word.strip() for word in visible.split(",")):
        prefix = word if len(word) > 4 else "no UUID"
        matching = [gpu for i, gpu in enumerate(gpus) if word == str(i) or gpu.uuid.startswith(prefix)]
        if len(matching) != 1 or matching[0] in selected:
            break
        selected += matching
    return selected


def first_unmapped(gpus: Sequence[Gpu]) -> tuple[int, int] | None:
    """Return the first two GPUs that cannot read each other's memory, or None if none are known."""
    possible = None, pynvml.NVML_P2P_STATUS_OK, pynvml.NVML_P2P_STATUS_UNKNOWN
    for (first, one), (second, other) in combinations(enumerate(gpu_handles(gpus)), 2):
        if ask(pynvml.nvmlDeviceGetP2PStatus, one, other, P2P_READ) not in possible:
            return first, second
    return None


def _describe(handle: Any) -> Gpu:
    states = [
        ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    ]
    active = [link for link, state in enumerate(states) if state == pynvml.NVML_FEATURE_ENABLED]
    memory, pci = ask(pynvml.nvmlDeviceGetMemoryInfo, handle), ask(pynvml.nvmlDeviceGetPciInfo, handle)
    milliwatts = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        memory_bytes=None if memory is None else int(memory.total),
        power_limit_watts=None if milliwatts is None else milliwatts / 1e3,
        driver=ask(pynvml.nvmlSystemGetDriverVersion),
        numa_node=None if pci is None else _numa_node(str(pci.busId)),
        nvlink_ends=dict(Counter(_nvlink_end(handle, link) for link in active)),
        pci_address=None if pci is None else str(pci.busId).lower(),
        pcie_generation=ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
    )


def _nvlink_end(handle: Any, link: int) -> str:
    """Return the other end of an NVLink: a GPU's PCI address, or a switch."""
    kind = ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
        pci = ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        return UNKNOWN if pci is None else str(pci.busId).lower()
    return SWITCH if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH else UNKNOWN


def _numa_node(address: str) -> int | None:
    """Return the NUMA node of a PCI address, or None if the kernel does not know the node.

    nvmlDeviceGetNumaNodeId returns another node, which the GPU's own memory forms.
    """
    with contextlib.suppress(OSError, ValueError):
        domain, _, slot = address.lower().partition(":")
        device = Path("/sys/bus/pci/devices", f"{int(domain, 16):04x}:{slot}")
        node = int((device / "numa_node").read_text(encoding="utf-8"))
        return node if node >= 0 else None
    return None
