"""List the GPU kernels of a training step, and find process sets that ran different kernels.

This module imports torch only when a step is profiled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ddpperf.instruments.trace import trace_of

if TYPE_CHECKING:
    import torch

    from ddpperf.results.samples import Measured

DIGITS = 12
ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def kernel_names(step: Callable[[], None], device: torch.device) -> list[str]:
    """Return the sorted names of the GPU kernels that a step runs, or of its operators on a CPU.

    `step` is called exactly once, even if profiling fails, because other ranks may wait in it. The
    list is empty if no profile can be made, for example without CUPTI. A compiled function is not
    listed as an operator.
    """
    category = "kernel" if device.type == "cuda" else "cpu_op"
    return _names(trace_of(step, device), category)


def _names(events: Iterable[dict[str, Any]], category: str) -> list[str]:
    """Return the names of all GPU kernels, or of all CPU operators, in a profiler trace.

    torch.compile records each call as an operator without a namespace. The name of this operator
    contains numbers that differ between processes, so that it is left out.
    """
    names = {str(event["name"]) for event in events if event.get("cat") == category}
    return sorted(name for name in names if category == "kernel" or "::" in name)


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
    """Return warnings that name process sets which ran different kernels than most process sets.

    In an A/B run the process sets of base and candidate are checked separately.
    """
    warnings = []
    for side in sorted({sample.side for sample in measured.samples}):
        groups = sorted(measured.of(side).different_kernels().values(), key=len, reverse=True)
        if groups:
            most, *others = groups
            alone = len(most) > len(others[0])
            named = [
                sample.set for sample in measured.samples if any(sample.set in group for group in others)
            ]
            warnings.append(
                f"process {_sets(named)} ran other kernels than {'all others' if alone else _sets(most)}"
            )
    return warnings


def _sets(names: Sequence[str]) -> str:
    *others, last = names
    return f"sets {', '.join(others)} and {last}" if others else f"set {last}"
