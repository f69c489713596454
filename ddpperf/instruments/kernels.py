"""The kernels of a step: their names, a digest by which process sets are compared, and which sets ran others.

Without torch until a step is profiled.
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
    """The names of what one call of `step` runs, sorted: a GPU's kernels, or the operators of a CPU.

    `step` is called once whatever becomes of the profile, for other ranks may wait in it; what it raises is raised. A profile
    that cannot be had, for want of CUPTI or of the right to use it, has no names. On a CPU a compiled part is no operator.
    """
    category = "kernel" if device.type == "cuda" else "cpu_op"
    return _names(trace_of(step, device), category)


def _names(events: Iterable[dict[str, Any]], category: str) -> list[str]:
    """The names of one category of a trace's events: others are copies, fills, launches, and what torch and models annotate.

    Among a CPU's operators are the marks of torch.compile, which bear numbers of a process' own; they have no namespace.
    """
    names = {str(event["name"]) for event in events if event.get("cat") == category}
    return sorted(name for name in names if category == "kernel" or "::" in name)


def digest(names: Iterable[str]) -> str:
    """12 hexadecimal digits of what ran, whatever the order and however often; empty for nothing.

    Addresses are left out, for they are each process' own. All other numbers stay: in a library's name they are tile sizes, and
    inductor counts the kernels of each graph that it compiles from 0, so that equal code gets equal numbers in every process,
    and other numbers mean that something was fused otherwise.
    """
    kinds = sorted({ADDRESS.sub("", name) for name in names})
    return hashlib.sha256("\n".join(kinds).encode()).hexdigest()[:DIGITS] if kinds else ""


def digest_of_ranks(digests: Sequence[str]) -> str:
    """A process set's digest, of its ranks' digests in their order; empty if one is."""
    return digest(f"{rank} {each}" for rank, each in enumerate(digests)) if all(digests) else ""


def other_kernels(measured: Measured) -> list[str]:
    """The doubt about each side whose sets did not all run the same kernels."""
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
