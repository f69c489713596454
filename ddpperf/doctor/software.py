"""Checks of the environment's variables, git, torchvision and the compiler."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ddpperf.doctor.findings import Finding, good, warn
from ddpperf.machine.compiler import compiler_reason
from ddpperf.machine.git import NO_COMMIT, commit, without_commit
from ddpperf.machine.gpu_description import Gpu
from ddpperf.workers.interpreter import release

TORCHVISION_OFFSET = 15  # torch 2.N and torchvision 0.(N + 15) are released together
_BINDS = "threads of all ranks may share a core"
_OLD_CPU = "torch does not use all instructions of this CPU"
SPOILING_VARIABLES = {  # what each of them does to a measurement, unless its value is harmless
    "ATEN_CPU_CAPABILITY": _OLD_CPU,
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for each kernel",
    "DNNL_MAX_CPU_ISA": _OLD_CPU,
    "GOMP_CPU_AFFINITY": _BINDS,
    "KMP_AFFINITY": _BINDS,
    "MALLOC_PERTURB_": "malloc fills all memory that it returns",
    "NCCL_DEBUG": "NCCL prints while it is timed",
    "NCCL_P2P_DISABLE": "GPUs do not use NVLink or PCIe directly",
    "NCCL_SHM_DISABLE": "ranks exchange data over the network",
    "OMP_PLACES": _BINDS,
    "OMP_PROC_BIND": _BINDS,
    "ONEDNN_MAX_CPU_ISA": _OLD_CPU,
    "PYTHONDEVMODE": "Python makes additional checks",
    "PYTHONMALLOC": "Python uses another allocator",
    "PYTHONTRACEMALLOC": "Python records each allocation",
    "TORCH_COMPILE_DISABLE": "compiled steps run eagerly",
    "TORCHDYNAMO_DISABLE": "compiled steps run eagerly",
    "TORCH_DISTRIBUTED_DEBUG": "each collective is checked by further collectives",
    "TORCH_LOGS": "torch prints while it is timed",
}
HARMLESS_VALUES = {"", "0", "OFF", "FALSE", "VERSION", "WARN", "PYMALLOC", "ALL", "DISABLED", "NONE"}


def variables(gpus: Sequence[Gpu]) -> Finding:
    """Report environment variables that would change measured times."""
    spoiling = [
        f"{name}={value}: {effect}"
        for name, effect in SPOILING_VARIABLES.items()
        if (value := os.environ.get(name, "")).upper() not in HARMLESS_VALUES
    ]
    if spoiling:
        return warn("; ".join(spoiling), "unset the variables whose effect you do not want to measure")
    return good("none of them changes measured times")


def repository(gpus: Sequence[Gpu]) -> Finding:
    """Check whether git knows the commit of this folder, which comparisons check out."""
    if (name := commit(Path.cwd())) == NO_COMMIT:
        why = f"this folder has no commit ({without_commit(Path.cwd())})"
        text = f"{why}, so no run can be compared with a stored run's code"
        return warn(text, "start in a git repository that git can read, with a commit")
    changed = ", and changes that are not committed" if name.endswith("+") else ""
    return good(f"commit {name.rstrip('+')}{changed}")


def torchvision(gpus: Sequence[Gpu]) -> Finding:
    """Check whether torchvision is installed and belongs to the installed torch."""
    try:
        torch, version = metadata.version("torch"), metadata.version("torchvision")
    except metadata.PackageNotFoundError as missing:
        return warn(f"{missing.name} is not installed, so no model of torchvision can run", "install it")
    major, minor = release(torch)
    fitting = f"0.{minor + TORCHVISION_OFFSET}"
    if major == 2 and release(version) != release(fitting):
        text = f"{version} is made for another torch; torch {torch} needs torchvision {fitting}"
        return warn(text, f"pip install torchvision=={fitting}.*")
    return good(version)


def compiler(gpus: Sequence[Gpu]) -> Finding:
    """Check whether torch.compile finds the compilers that it needs."""
    if reason := compiler_reason("cuda" if gpus else "cpu"):
        text, _, advice = reason.rpartition("; ")
        return warn(text, advice)
    return good(os.environ.get("CXX", "g++"))
