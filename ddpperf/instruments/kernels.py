"""List the GPU kernels of a training step, and find process sets that ran different kernels.

This module imports torch only when a step is profiled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ddpperf.measuring.trace_split import trace_of
from ddpperf.results.samples import BASE, CANDIDATE, Measured

if TYPE_CHECKING:
    import torch

DIGITS = 12
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def kernel_names(step: Callable[[], None], device: torch.device) -> list[str]:
    """Return the sorted names of the GPU kernels that a step runs, or of its operators on a CPU.

    `step` is called exactly once, even if profiling fails, because other ranks may wait in it. The
    list is empty if no profile can be made, for example without CUPTI. A compiled function is not
    listed as an operator.
    """
    is_gpu = device.type == "cuda"
    category = "kernel" if is_gpu else "cpu_op"
    names = {event["name"] for event in trace_of(step, device) if event.get("cat") == category}
    # torch.compile records each call as an operator without a namespace, by a name with numbers
    # that differ between processes.
    return sorted(name for name in names if is_gpu or "::" in name)


def digest(names: Iterable[str]) -> str:
    """Return a hash (12 hexadecimal digits) of kernel names, or "" if there are no names.

    Addresses in names differ between processes and are removed. Other numbers are kept, such as
    tile sizes and inductor's kernel numbers. Two processes that compile the same graphs get the
    same kernel numbers.
    """
    kinds = sorted({ADDRESS.sub("", name) for name in names})
    return hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:DIGITS] if kinds else ""


def digest_of_ranks(digests: Sequence[str]) -> str:
    """Combine the hashes of all ranks' kernel names into one hash for the whole process set.

    Returns "" if the hash of a rank is empty.
    """
    return digest(f"{rank} {each}" for rank, each in enumerate(digests)) if all(digests) else ""


def other_kernels(measured: Measured) -> list[str]:
    """Return a warning if process sets ran different kernels. It groups the sets with equal kernels.

    In an A/B run the process sets of base and candidate are checked separately, because base and
    candidate may differ by design. Process sets with unknown kernels are left out.
    """
    warnings = []
    for side in (BASE, CANDIDATE):
        groups: dict[str, list[str]] = {}
        for sample in measured.samples:
            if sample.side == side and sample.kernels:
                groups.setdefault(sample.kernels, []).append(sample.set)
        if len(groups) > 1:
            listed = "; ".join(", ".join(names) for names in groups.values())
            warnings.append(f"process sets ran different kernels: {listed}")
    return warnings
