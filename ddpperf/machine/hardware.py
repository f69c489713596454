"""What a time depends on: GPUs, links, CPU. Read from the driver and the kernel; CUDA is never initialised here."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from ddpperf.machine.git import commit
from ddpperf.machine.links import Links
from ddpperf.specs import Spec

_T = TypeVar("_T")
# what a CPU has by which torch computes in bf16: on x86 either of the first two, on Arm the last
BF16_FLAGS: tuple[set[str], ...] = ({"avx512bw", "avx512vl", "avx512dq"}, {"avx_ne_convert"}, {"bf16"})
P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which nvidia-ml-py has as a tuple, which it does not take itself


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver describes it; None for what the driver does not tell."""

    name: str
    uuid: str
    memory_bytes: int | None
    power_limit_watts: float | None
    nvlinks: int | None
    nvlink_bytes_per_second: float | None  # of all of them together, in one direction
    driver: str | None
    numa_node: int | None


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA will number 0, 1, ...: the driver's, as far as CUDA_VISIBLE_DEVICES shows them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver library, no driver, no GPU, or no nvidia-ml-py: in every case none is known
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return select_visible(
            [_describe(pynvml, handle) for handle in handles], os.environ.get("CUDA_VISIBLE_DEVICES")
        )
    finally:
        pynvml.nvmlShutdown()


def first_unmapped(gpus: Sequence[Gpu]) -> tuple[int, int] | None:
    """The numbers of the first two GPUs that cannot read each other's memory; None if all can, or the driver does not tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # as above
        return None
    possible = pynvml.NVML_P2P_STATUS_OK, pynvml.NVML_P2P_STATUS_UNKNOWN
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
        for first, second in sorted(combinations(range(len(handles)), 2), key=max):
            status = pynvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], P2P_READ)
            if status not in possible:
                return first, second
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()
    return None


def select_visible(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES shows, in its order; what follows an unknown one is hidden, as in CUDA."""
    if visible is None:
        return list(gpus)
    selected: list[Gpu] = []
    for word in (word.strip() for word in visible.split(",")):
        matching = [
            gpu
            for index, gpu in enumerate(gpus)
            if word == str(index) or (len(word) > 4 and gpu.uuid.startswith(word))
        ]
        if len(matching) != 1 or matching[0] in selected:
            break
        selected += matching
    return selected


def _describe(pynvml: Any, handle: Any) -> Gpu:
    def known(read: Callable[[], _T]) -> _T | None:
        with contextlib.suppress(pynvml.NVMLError):
            return read()
        return None

    def nvlinks() -> int | None:
        links = range(pynvml.NVML_NVLINK_MAX_LINKS)
        states = [known(lambda link=link: pynvml.nvmlDeviceGetNvLinkState(handle, link)) for link in links]  # type: ignore[misc]
        told = [state for state in states if state is not None]
        return sum(state == pynvml.NVML_FEATURE_ENABLED for state in told) if told else None

    def link_bytes_per_second() -> float | None:
        fields = (pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_L0)
        told = known(lambda: pynvml.nvmlDeviceGetFieldValues(handle, list(fields))) or ()
        rates = [
            each.value.uiVal for each in told if each.nvmlReturn == pynvml.NVML_SUCCESS and each.value.uiVal
        ]
        return data_rate(rates[0]) if rates else None

    links, link_rate = nvlinks(), link_bytes_per_second()
    limit = known(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    return Gpu(
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        memory_bytes=known(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)),
        power_limit_watts=None if limit is None else limit / 1e3,
        nvlinks=links,
        nvlink_bytes_per_second=links * link_rate if links and link_rate else None,
        driver=known(pynvml.nvmlSystemGetDriverVersion),
        numa_node=_numa_node(known(lambda: str(pynvml.nvmlDeviceGetPciInfo(handle).busId))),
    )


def data_rate(megabytes_per_second: int) -> float:
    """Bytes per second that a link carries in one direction, of the rate of its line as the driver tells it, which of NVLink
    2, 4 and 5 counts what its coding and error correction need."""
    return {25781: 25e9, 26562: 25e9, 53125: 50e9}.get(megabytes_per_second, megabytes_per_second * 1e6)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What experiments compare with. gpu: the name of its GPUs, if they are alike. link_bytes_per_second: between one GPU and
    all others, in one direction. None where it is not known. links: what the user says of them, and of what lies beyond.
    world_sizes: the numbers of devices that the run has. unmapped: the numbers of the first two GPUs that cannot read each
    other's memory, as far as the driver tells."""

    device: str = "cpu"
    gpu: str | None = None
    link_bytes_per_second: float | None = None
    links: Links = field(default_factory=Links)
    world_sizes: tuple[int, ...] = ()
    unmapped: tuple[int, int] | None = None

    def mapping_reason(self, spec: Spec) -> str:
        """Why the GPUs cannot map their memory as `spec` asks, in a sentence; empty if they can."""
        if not spec.maps_memory or self.unmapped is None or max(self.unmapped) >= spec.world_size:
            return ""
        first, second = self.unmapped
        return f"it maps the memory of all GPUs, and GPU {first} and GPU {second} cannot read each other's"


def machine(device: str, gpus: Sequence[Gpu], links: Links, world_sizes: tuple[int, ...] = ()) -> Machine:
    """What the user says of a link comes before what the driver does."""
    alike = device == "cuda" and len({gpu.name for gpu in gpus}) == 1
    rates = {gpu.nvlink_bytes_per_second for gpu in gpus} if alike else {None}
    told = rates.pop() if len(rates) == 1 else None
    link = links.bytes_per_second or told
    gpu = gpus[0].name if alike else None
    unmapped = first_unmapped(gpus) if device == "cuda" else None
    return Machine(
        device=device,
        gpu=gpu,
        link_bytes_per_second=link,
        links=links,
        world_sizes=world_sizes,
        unmapped=unmapped,
    )


def _numa_node(address: str | None) -> int | None:
    """The NUMA node that a device's slot is in, by its PCI address; None if the kernel, or a virtual machine's, does not tell.

    The driver's own answer (nvmlDeviceGetNumaNodeId) is another: the node that a GPU's memory is, where that is one.
    """
    with contextlib.suppress(OSError, ValueError):
        domain, _, slot = (address or "").lower().partition(":")
        node = int(Path(f"/sys/bus/pci/devices/{int(domain, 16):04x}:{slot}/numa_node").read_text())
        return node if node >= 0 else None
    return None


def machine_info() -> dict[str, Any]:
    """As pytest-benchmark stores it: without what is not the same from run to run."""
    return {
        "node": platform.node(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python_implementation": platform.python_implementation(),
        "python_version": platform.python_version(),
        "cpu": {"brand_raw": cpu_model(), "count": core_count()},
    }


def cpu_model() -> str:
    """The CPU's name as the kernel gives it; where that has no number, as in many clouds, with the numbers of its design."""
    if facts := _cpu_facts():
        name = facts.get("model name", platform.machine()).strip()
        numbers = ("cpu family", "model", "stepping", "CPU implementer", "CPU part")
        design = " ".join(facts[number] for number in numbers if number in facts)
        return name if re.search(r"\d{3}", re.sub("@.*", "", name)) else f"{name} {design}"
    return platform.processor() or platform.machine()


def computes_bf16() -> bool:
    """Whether the CPU has what torch computes bf16 with; True where the kernel does not tell.

    Without that a convolution of bf16 is a plain loop, which takes tens of times fp32's.
    """
    facts = _cpu_facts()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return not flags or any(needed <= flags for needed in BF16_FLAGS)


def _cpu_facts() -> dict[str, str]:
    """What the kernel tells of one of the cores; nothing where it does not."""
    with contextlib.suppress(OSError):
        return dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    return {}


def core_count() -> int:
    """The cores that this process may use: those it may run on, within the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def hardware_key(device: str, gpus: Sequence[Gpu]) -> str:
    """The name of all machines whose times compare: `h200x4` for visible GPUs, `cpu2-xeon-8581c` for cores."""
    if device == "cuda":
        counts = Counter(_slug(gpu.name, drop={"nvidia"}) for gpu in gpus)
        return "+".join(f"{name}x{count}" for name, count in counts.items())
    dropped = {"intel", "amd", "cpu", "processor", "platinum", "gold", "silver", "bronze", "core"}
    return f"cpu{core_count()}-{_slug(cpu_model(), drop=dropped)}".rstrip("-")


def _slug(name: str, drop: set[str]) -> str:
    name = re.sub(r"\((r|tm)\)|@ ?[\d.]+ghz|\d+-core", " ", name.lower())
    return "-".join(word for word in re.findall(r"[a-z0-9]+", name) if word not in drop)


def environment(device: str, gpus: Sequence[Gpu], root: Path) -> dict[str, Any]:
    """What the controller knows of the machine; the workers add torch, CUDA and the backend."""
    return {
        "commit": commit(root),
        "cpu": cpu_model(),
        "cores": core_count(),
        "gpus": [asdict(gpu) for gpu in gpus] if device == "cuda" else [],
        "system": f"{platform.system()} {platform.release()}",
        "hostname": platform.node(),
    }
