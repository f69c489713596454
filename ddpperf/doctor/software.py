"""Check whether the environment's variables, torchvision and the compiler are fit for measuring."""

from __future__ import annotations

import os
import time
from importlib import metadata
from pathlib import Path

from ddpperf.doctor.findings import LATE, Finding, Subject, good, warn
from ddpperf.machine.compiler import compiler_problem
from ddpperf.workers.interpreter import release

TORCHVISION_OFFSET = 15  # torch 2.N and torchvision 0.(N + 15) are released together
SPOILING_VARIABLES = {  # what each of them does to a measurement, unless its value is harmless
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for each kernel",
    "MALLOC_PERTURB_": "all memory is written once more",
    "NCCL_DEBUG": "NCCL prints while it is timed",
    "NCCL_P2P_DISABLE": "GPUs do not use NVLink or PCIe directly",
    "NCCL_SHM_DISABLE": "ranks exchange data by the network",
    "PYTHONDEVMODE": "Python checks itself at run time",
    "PYTHONMALLOC": "Python uses another allocator",
    "PYTHONTRACEMALLOC": "Python records each allocation",
    "TORCH_COMPILE_DISABLE": "compiled steps run eagerly",
    "TORCHDYNAMO_DISABLE": "compiled steps run eagerly",
    "TORCH_DISTRIBUTED_DEBUG": "each collective is checked by further collectives",
    "TORCH_LOGS": "torch prints while it is timed",
}
HARMLESS_VALUES = {"", "0", "OFF", "VERSION", "WARN", "PYMALLOC"}
# Libraries of torch that LD_LIBRARY_PATH can replace, outside of the system's own folders
LIBRARIES = ("libnccl.so*", "libcudnn.so*", "libtorch*.so*", "libc10*.so*", "libstdc++.so*")
SYSTEM_FOLDERS = ("/lib", "/usr/lib")


def variables_finding() -> Finding:
    """Report environment variables that would change measured times."""
    spoiling = [
        f"{name}={value}: {effect}"
        for name, effect in SPOILING_VARIABLES.items()
        if (value := os.environ.get(name, "")).upper() not in HARMLESS_VALUES
    ]
    folders = [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if name]
    found = [
        str(library)
        for folder in folders
        if not str(folder.resolve()).startswith(SYSTEM_FOLDERS)
        for pattern in LIBRARIES
        for library in sorted(folder.glob(pattern))[:1]
    ]
    if found:
        spoiling.append(f"LD_LIBRARY_PATH: may replace torch's library by {', '.join(found)}")
    if spoiling:
        return warn(Subject.VARIABLES, "; ".join(spoiling), "unset what is not meant to be measured")
    return good(Subject.VARIABLES, "none spoils a measurement")


def torchvision_finding() -> Finding:
    """Check whether torchvision is installed and belongs to the installed torch."""
    torch, version = (_version(name) for name in ("torch", "torchvision"))
    major, minor = release(torch)
    fitting = f"0.{minor + TORCHVISION_OFFSET}" if major == 2 else ""
    advice = f"pip install torchvision=={fitting}.*" if fitting else "install the torchvision of this torch"
    if not version:
        return warn(Subject.TORCHVISION, "not installed, so its models and loaders cannot run", advice)
    if fitting and release(version) != release(fitting):
        text = f"{version} belongs to another torch, torch {torch} to torchvision {fitting}"
        return warn(Subject.TORCHVISION, text, advice)
    return good(Subject.TORCHVISION, version)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def compiler_finding(device: str, seconds: float) -> Finding:
    """Check whether torch.compile finds the compilers that it needs."""
    began = time.monotonic()
    problem = compiler_problem(device, seconds)
    if problem and time.monotonic() - began >= seconds:
        text = f"it did not compile a short file within {seconds:.2g} s"
        return warn(Subject.COMPILER, text, LATE)
    if problem:
        return warn(Subject.COMPILER, problem, "install both")
    return good(Subject.COMPILER, os.environ.get("CXX", "g++"))
