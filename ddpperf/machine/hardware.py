"""The hardware that times depend on, as the GPU driver and the kernel report it.

CUDA is never initialised here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpperf.io.secret_values import shown_value
from ddpperf.machine.cgroup import cpu_quota
from ddpperf.machine.git import commit
from ddpperf.machine.gpu_description import Gpu
from ddpperf.machine.links import CPU, SWITCH, UNKNOWN, LinkRate, gpu_link, link_between, nvlink
from ddpperf.specs import Spec

if TYPE_CHECKING:  # the imports take numpy and psutil, and the doctor runs where they cannot be imported
    from ddpperf.analysis.projection import Network
    from ddpperf.machine.network import Interface

# CPU flags with which torch computes in bf16 quickly: the first or the second group on x86, the
# third on Arm
BF16_FLAGS: tuple[set[str], ...] = ({"avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"})
# Prefixes of environment variables that change how fast torch and its libraries run.
TUNING_VARIABLES = (
    *("CUBLAS", "CUDA_", "CUDNN", "GLIBC_TUNABLES", "GLOO", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS", "PYTHON", "TORCH", "TRITON"),
)
DEMANDS = "NVIDIA_REQUIRE_"  # a container's demands on its host, in 2,000 characters
P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py defines wrongly, as a tuple


def load_nvml() -> Any | None:
    """Return the driver's library NVML, or None if there is no driver, GPU or nvidia-ml-py."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()  # never shut down, since loading NVML takes long
        return pynvml
    return None


def query_nvml(function: str, *arguments: Any) -> Any | None:
    """Call a function of NVML by its name, and return None if it fails."""
    with contextlib.suppress(Exception):
        import pynvml

        return getattr(pynvml, function)(*arguments)
    return None


def gpu_handles(uuids: Iterable[str]) -> dict[int, Any]:
    """Return NVML's handles of the GPUs that the driver still knows, by their place in `uuids`."""
    handles = {place: query_nvml("nvmlDeviceGetHandleByUUID", uuid) for place, uuid in enumerate(uuids)}
    return {place: handle for place, handle in handles.items() if handle is not None}


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, in the order in which CUDA numbers them."""
    if (nvml := load_nvml()) is None:
        return []
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    gpus = [_describe(nvml, handle) for handle in handles]
    return select_visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def first_unmapped(gpus: Sequence[Gpu]) -> tuple[int, int] | None:
    """Return the first two GPUs that cannot read each other's memory, or None if none are known."""
    if (nvml := load_nvml()) is None:
        return None
    possible = None, nvml.NVML_P2P_STATUS_OK, nvml.NVML_P2P_STATUS_UNKNOWN
    handles = [query_nvml("nvmlDeviceGetHandleByUUID", gpu.uuid) for gpu in gpus]
    for first, second in sorted(combinations(range(len(handles)), 2), key=max):
        if query_nvml("nvmlDeviceGetP2PStatus", handles[first], handles[second], P2P_READ) not in possible:
            return first, second
    return None


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


def _describe(nvml: Any, handle: Any) -> Gpu:
    name = nvml.nvmlDeviceGetName(handle)
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    states = [query_nvml("nvmlDeviceGetNvLinkState", handle, link) for link in links]
    active = [link for link in links if states[link] == nvml.NVML_FEATURE_ENABLED]
    generation, rate = nvlink(name)
    memory, pci = query_nvml("nvmlDeviceGetMemoryInfo", handle), query_nvml("nvmlDeviceGetPciInfo", handle)
    milliwatts = query_nvml("nvmlDeviceGetEnforcedPowerLimit", handle)
    return Gpu(
        name=name,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        memory_bytes=None if memory is None else int(memory.total),
        power_limit_watts=None if milliwatts is None else milliwatts / 1e3,
        nvlinks=len(active) if states.count(None) < len(states) else None,
        nvlink_bytes_per_second=len(active) * rate if active and rate else None,
        driver=query_nvml("nvmlSystemGetDriverVersion"),
        numa_node=None if pci is None else _numa_node(str(pci.busId)),
        nvlink_generation=generation if active else None,
        nvlink_ends=dict(Counter(_nvlink_end(nvml, handle, link) for link in active)),
        pci_address=None if pci is None else str(pci.busId).lower(),
        pcie_generation=query_nvml("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=query_nvml("nvmlDeviceGetMaxPcieLinkWidth", handle),
    )


def _nvlink_end(nvml: Any, handle: Any, link: int) -> str:
    """Return the other end of an NVLink: a GPU's PCI address, a switch or a CPU."""
    kind = query_nvml("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
    if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
        pci = query_nvml("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        return UNKNOWN if pci is None else str(pci.busId).lower()
    kinds = {nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: SWITCH, nvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU: CPU}
    return kinds.get(kind, UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The user's options about the links between devices and between nodes.

    node: the number of devices in a node. network: the network between nodes. project_to: the numbers
    of devices to project step times to. buffer_sizes: bytes per rank of collective calls. If it is
    empty, each experiment has its own default.
    """

    node: int = 1
    network: Network | None = None
    project_to: tuple[int, ...] = ()
    buffer_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device type, the GPU model and the links of the machine, on which experiments depend.

    links: the links as the user describes them. world_sizes: the numbers of devices that the test run
    uses. unmapped: the indices of the first two GPUs that cannot read each other's memory; None if
    none are known. interface: the network interface to the other nodes; None in a run on one node.
    gpus: the GPUs in the order of the ranks; empty on the CPU, whose links have no known rate.
    """

    device: str = "cpu"
    links: Links = field(default_factory=Links)
    world_sizes: tuple[int, ...] = ()
    unmapped: tuple[int, int] | None = None
    interface: Interface | None = None
    gpus: tuple[Gpu, ...] = field(default=(), compare=False)

    @property
    def gpu(self) -> str | None:
        """The name of the GPUs, or None if they have several names."""
        names = {gpu.name for gpu in self.gpus}
        return names.pop() if len(names) == 1 else None

    def link(self, world_size: int) -> LinkRate | None:
        """Return the rate of the link that the first `world_size` devices share, or None if unknown.

        Across nodes, this is the rate of a whole node's link, not a device's part of it. In a flat
        ring, consecutive ranks are on one node, so each node sends the bytes of one rank: 2(N-1)/N
        times the buffer. Their rate is busbw as in nccl-tests, and the link is its upper bound.
        A rate between nodes from the user overrides the nominal rate.
        """
        if self.interface is not None and self.crosses_nodes(world_size):
            given = self.links.network.bandwidth if self.links.network else None
            return link_between(self.interface, self.links.node, given)
        return gpu_link(self.gpus[:world_size])

    def crosses_nodes(self, world_size: int) -> bool:
        """Return whether `world_size` ranks are on several nodes."""
        return self.interface is not None and world_size > self.links.node

    def ranks_here(self, world_size: int) -> int:
        """Return how many of `world_size` ranks share this machine's CPU cores.

        Nodes that loopback connects are one machine.
        """
        far = self.interface is not None and not self.interface.is_loopback
        return min(world_size, self.links.node) if far else world_size

    def mapping_reason(self, spec: Spec) -> str:
        """Return why the GPUs cannot map memory as a spec requires, or an empty string."""
        if spec.maps_memory and self.crosses_nodes(spec.world_size):
            return f"it maps the memory of all GPUs, and its {spec.world_size} ranks are on several nodes"
        if not spec.maps_memory or self.unmapped is None or max(self.unmapped) >= spec.world_size:
            return ""
        first, second = self.unmapped
        return f"it maps the memory of all GPUs, and GPU {first} and GPU {second} cannot read each other's"


def _numa_node(address: str) -> int | None:
    """Return the NUMA node of a PCI address, or None if the kernel does not know the node.

    nvmlDeviceGetNumaNodeId returns another node, which the GPU's own memory forms.
    """
    with contextlib.suppress(OSError, ValueError):
        domain, _, slot = address.lower().partition(":")
        node = int(Path(f"/sys/bus/pci/devices/{int(domain, 16):04x}:{slot}/numa_node").read_text())
        return node if node >= 0 else None
    return None


def machine_info() -> dict[str, Any]:
    """Return a description of the machine in pytest-benchmark's format."""
    return {
        "node": platform.node(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python_implementation": platform.python_implementation(),
        "python_version": platform.python_version(),
        "cpu": {"brand_raw": cpu_model(), "count": core_count()},
    }


def cpu_model() -> str:
    """Return the name of the CPU's model as the kernel reports it.

    A name without a model number, as in many clouds, is followed by family, model and stepping.
    """
    if facts := _cpu_facts():
        name = facts.get("model name", platform.machine()).strip()
        numbers = ("cpu family", "model", "stepping", "CPU implementer", "CPU part")
        design = " ".join(facts[number] for number in numbers if number in facts)
        return name if re.search(r"\d{3}", re.sub("@.*", "", name)) else f"{name} {design}"
    return platform.processor() or platform.machine()


def computes_bf16() -> bool:
    """Return whether torch computes in bf16 quickly on this CPU, which needs certain instructions.

    Without these instructions a bf16 convolution is a plain loop, tens of times slower than in
    fp32. The result is True if the kernel does not list the CPU's instructions.
    """
    facts = _cpu_facts()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return not flags or any(needed <= flags for needed in BF16_FLAGS)


def _cpu_facts() -> dict[str, str]:
    """Return the last core's entry of /proc/cpuinfo, or an empty dict without that file."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        return dict(re.findall(r"^(.+?)\s*: (.*)$", text, re.MULTILINE))
    return {}


def core_count() -> int:
    """Return how many CPU cores this process may use by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else min(cores, math.ceil(quota))


def hardware_key(device: str, gpus: Sequence[Gpu]) -> str:
    """Return a name such as `h200x4` that machines share if their step times can be compared."""
    if device == "cuda":
        counts = Counter(_slug(gpu.name, drop={"nvidia"}) for gpu in gpus)
        return "+".join(f"{name}x{count}" for name, count in counts.items())
    dropped = {"intel", "amd", "cpu", "processor", "platinum", "gold", "silver", "bronze", "core"}
    return f"cpu{core_count()}-{_slug(cpu_model(), drop=dropped)}".rstrip("-")


def _slug(name: str, drop: set[str]) -> str:
    name = re.sub(r"\((r|tm)\)|@ ?[\d.]+ghz|\d+-core", " ", name.lower())
    return "-".join(word for word in re.findall(r"[a-z0-9]+", name) if word not in drop)


def environment(device: str, gpus: Sequence[Gpu], root: Path) -> dict[str, Any]:
    """Return the commit, CPU, GPUs and system of the machine, to be stored with a test run.

    The ranks add the versions of torch and of the backend.
    """
    return {
        "commit": commit(root),
        "cpu": cpu_model(),
        "cores": core_count(),
        "gpus": [asdict(gpu) for gpu in gpus] if device == "cuda" else [],
        "system": f"{platform.system()} {platform.release()}",
        "hostname": platform.node(),
        "executable": sys.executable,
        "customized": _customized(),
        "variables": {
            name: shown_value(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(TUNING_VARIABLES) and not name.startswith(DEMANDS)
        },
    }


def _customized() -> dict[str, str]:
    """Return a digest of sitecustomize.py and usercustomize.py, which Python runs at each start, by path."""
    found = {}
    for name in ("sitecustomize", "usercustomize"):
        with contextlib.suppress(ImportError, ValueError, OSError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                found[spec.origin] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12]
    return found


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between the environments of two stored runs, except for the commit."""
    found = []
    for name in sorted(
        then.keys() & now.keys() - {"commit", "gpus", "pinning", "hostname", "links", "nodes"}
    ):
        if isinstance(then[name], dict) and isinstance(now[name], dict):
            keys = sorted(then[name].keys() | now[name].keys())
            pairs = [(key, then[name].get(key, "not set"), now[name].get(key, "not set")) for key in keys]
        else:
            pairs = [(name, then[name], now[name])]
        found += [f"{key} was {before}, is {after}" for key, before, after in pairs if before != after]
    return found
