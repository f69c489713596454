"""The kernels of a step, and a digest that shows which process sets ran other kernels.

Imports torch only when a step is profiled.
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
    """Return the sorted names of a step's GPU kernels, or of its operators on a CPU.

    `step` is called exactly once, even if profiling fails: other ranks may wait in it. Without a
    profile, for example without CUPTI, there are no names. A compiled part is no operator.
    """
    category = "kernel" if device.type == "cuda" else "cpu_op"
    return _names(trace_of(step, device), category)


def _names(events: Iterable[dict[str, Any]], category: str) -> list[str]:
    """Return the names of a trace's kernels or operators.

    torch.compile marks its calls with numbers that differ between processes. The marks are recorded
    as operators without a namespace and are left out.
    """
    names = {str(event["name"]) for event in events if event.get("cat") == category}
    return sorted(name for name in names if category == "kernel" or "::" in name)


def digest(names: Iterable[str]) -> str:
    """Return 12 hexadecimal digits for a set of names; empty if there are none.

    Addresses in names differ between processes and are removed. Other numbers stay: tile sizes, and
    inductor's kernel numbers, which are equal in all processes that compile the same graphs.
    """
    kinds = sorted({ADDRESS.sub("", name) for name in names})
    return hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:DIGITS] if kinds else ""


def digest_of_ranks(digests: Sequence[str]) -> str:
    """Return a process set's digest of its ranks' digests; empty if one of them is empty."""
    return digest(f"{rank} {each}" for rank, each in enumerate(digests)) if all(digests) else ""


def other_kernels(measured: Measured) -> list[str]:
    """Return a warning for each side whose process sets did not all run the same kernels."""
    warnings = []
    for side in sorted({sample.side for sample in measured.samples}):
        groups = sorted(measured.of(side).different_kernels().values(), key=len, reverse=True)
        if groups:
            most, *others = groups
            alone = len(most) > len(others[0])
            named = [
                sample.set for sample in measured.samples if any(sample.set in group for group in others)
            ]
            warnings.append(f"{_sets(named)} ran other kernels than {'the rest' if alone else _sets(most)}")
    return warnings


def _sets(names: Sequence[str]) -> str:
    *others, last = names
    return f"sets {', '.join(others)} and {last}" if others else f"set {last}"
