"""The hardware that times depend on: the machine's devices and links, its CPU, and its key."""

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpperf.io.secret_values import shown_value
from ddpperf.machine.cgroup import cpu_quota
from ddpperf.machine.git import commit
from ddpperf.machine.gpu_description import Gpu, first_unmapped
from ddpperf.machine.links import LinkRate, gpu_link
from ddpperf.specs import Spec

if TYPE_CHECKING:  # the imports take numpy and psutil, and the doctor runs where they cannot be imported
    from ddpperf.analysis.projection import Network
    from ddpperf.machine.network import Interface

# CPU flags with one of which torch computes in bf16 quickly. All CPUs with avx512bw also have avx512vl
# and avx512dq, which torch checks, too. The last flag is that of Arm.
BF16_FLAGS = {"avx512bw", "avx_ne_convert", "bf16"}
# Prefixes of environment variables that change how fast torch and its libraries run.
TUNING_VARIABLES = (
    *("ATEN_", "CUBLAS", "CUDA_", "CUDNN", "DNNL_", "FI_", "GLIBC_TUNABLES", "GLOO", "GOMP_", "KMP_"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS"),
    *("PYTHON", "PYTORCH_", "TORCH", "TRITON", "UCX_"),
)
DEMANDS = "NVIDIA_REQUIRE_"  # a container's demands on its host, in 2,000 characters
INCOMPARABLE = {"commit", "gpus", "pinning", "hostname", "links", "nodes"}  # facts of an environment


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
    uses. interface: the network interface to the other nodes; None in a run on one node. gpus: the
    GPUs in the order of the ranks; empty on the CPU, whose links have no known rate.
    """

    device: str = "cpu"
    links: Links = field(default_factory=Links)
    world_sizes: tuple[int, ...] = ()
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
        --node-link, the rate of each device of a node to other nodes, overrides the interface's
        nominal rate.
        """
        if self.interface is None or not self.crosses_nodes(world_size):
            return gpu_link(self.gpus[:world_size])
        node, network = self.links.node, self.links.network
        if network is not None:
            source = "--node-link" + (f" of {node} devices" if node > 1 else "")
            return LinkRate(bytes_per_second=node * network.bandwidth, source=source, kind="given")
        if self.interface.bytes_per_second is None:
            return None
        source = f"{self.interface.link} between nodes"
        return LinkRate(bytes_per_second=self.interface.bytes_per_second, source=source)

    def crosses_nodes(self, world_size: int) -> bool:
        return self.interface is not None and world_size > self.links.node

    def ranks_here(self, world_size: int) -> int:
        """Return how many of `world_size` ranks share this machine's CPU cores."""
        return min(world_size, self.links.node) if self.interface is not None else world_size

    def mapping_reason(self, spec: Spec) -> str:
        """Return why the GPUs cannot map memory as a spec requires, or an empty string."""
        what = "it maps the memory of all GPUs, and"
        if spec.maps_memory and self.crosses_nodes(spec.world_size):
            return f"{what} its {spec.world_size} ranks are on several nodes"
        if spec.maps_memory and (pair := first_unmapped(self.gpus[: spec.world_size])):
            return f"{what} GPU {pair[0]} and GPU {pair[1]} cannot read each other's"
        return ""


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
    facts = _cpu_facts()
    name = facts.get("model name", platform.machine()).strip()
    numbers = ("cpu family", "model", "stepping", "CPU implementer", "CPU part")
    design = " ".join(facts[number] for number in numbers if number in facts)
    return name if re.search(r"\d{3}", re.sub("@.*", "", name)) else f"{name} {design}"


def computes_bf16() -> bool:
    """Return whether torch computes in bf16 quickly on this CPU, which needs certain instructions.

    Without these instructions a bf16 convolution is a plain loop, tens of times slower than in
    fp32. The result is True if the kernel does not list the CPU's instructions.
    """
    facts = _cpu_facts()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return not flags or bool(flags & BF16_FLAGS)


def _cpu_facts() -> dict[str, str]:
    """Return the last core's entry of /proc/cpuinfo."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return dict(re.findall(r"^(.+?)\s*: (.*)$", text, re.MULTILINE))


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
    for name in sorted(then.keys() & now.keys() - INCOMPARABLE):
        pair = (then[name], now[name])
        before, after = pair if all(isinstance(one, dict) for one in pair) else ({name: one} for one in pair)
        for key in sorted(before.keys() | after.keys()):
            was, is_now = before.get(key, "not set"), after.get(key, "not set")
            if was != is_now:
                found.append(f"{key} was {was}, is {is_now}")
    return found
