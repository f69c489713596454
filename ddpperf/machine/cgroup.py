"""The limits that this process's control groups (cgroups) set on CPU time and memory.

A process is in one cgroup of each hierarchy. The limits of all groups above its own hold, too.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

GROUPS = Path("/proc/self/cgroup")
MOUNTS = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """Return how many cores this process may use at the same time, or None without a limit."""
    quotas = []
    for folder in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):
            if (limit := folder / "cpu.max").exists():
                quota, period = limit.read_text().split()
            else:  # version 1
                quota, period = (
                    (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
                )
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_left() -> int | None:
    """Return how many bytes of memory the limits leave to this process, or None without a limit.

    Cached files count as left, because the kernel drops them when it needs memory.
    """
    left = []
    for folder in _folders("memory"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if (limit := folder / "memory.max").exists():
                used, cached = folder / "memory.current", "inactive_file"
            else:  # version 1, which writes a number near 2^63 for no limit
                limit, used = folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"
                cached = "total_inactive_file"
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if (most := limit.read_text().strip()) != "max" and int(most) < 2**62:
                left.append(int(most) - int(used.read_text()) + int(counts[cached]))
    return max(0, min(left)) if left else None


def _folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroups that limit CPU time or memory, its own cgroup first.

    In a container that sees the host's paths, only those of its own cgroup and above exist.
    """
    found: list[Path] = []
    with contextlib.suppress(OSError, ValueError):
        for line in os.fsdecode(GROUPS.read_bytes()).splitlines():
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            mount = MOUNTS / controller if names else MOUNTS  # version 2 has one hierarchy, without a name
            own = mount / path.lstrip("/")
            found += [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]
    return found
