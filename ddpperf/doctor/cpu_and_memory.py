"""Checks of CPU load, cores and memory, from what the kernel reports."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ddpperf.doctor.findings import Finding, bad, good, warn
from ddpperf.io.private_folders import SHARED_MEMORY
from ddpperf.machine.cgroup import cpu_quota, memory_left
from ddpperf.machine.gpu_description import Gpu
from ddpperf.machine.hardware import core_count
from ddpperf.results import units

CPUS = Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BUSY_CORES = 0.5  # used by others: a rank on this core takes about twice as long
BUSY_FRACTION = 0.1  # of all cores, on machines whose services use more than BUSY_CORES
NAMED_CORES = 0.2  # the heaviest process is named if it uses more
WATCH_SECONDS = 0.25  # of the CPU's load
LEAST_RANKS = 2  # of a run
RANK_BYTES = 1e9  # a rank of two with resnet18 and batch size 32 uses 0.8 GB
# Batches that the workers of one rank's loader hold: 4 workers, 2 batches of 128 x 3 x 224 x 224 bytes
SHARED_BYTES_PER_RANK = 160e6
NCCL_SEGMENT_BYTES = 10e6  # NCCL cannot connect two ranks through memory with less


def cpu_load(gpus: Sequence[Gpu]) -> Finding:
    """Watch the CPU for a moment, and report whether other processes use it."""
    try:
        _used_cores()
        time.sleep(WATCH_SECONDS)
        return judged_load(*_used_cores())
    except Exception:  # psutil cannot read what this kernel reports
        return good("not known")


def _used_cores() -> tuple[int, float, dict[int, float]]:
    """Return the number of allowed cores, how many are busy, and how many each other process uses there.

    Only CPU time since the last call counts. This process counts as idle.
    """
    allowed, own = os.sched_getaffinity(0), 0.0
    percents = [used for core, used in enumerate(psutil.cpu_percent(percpu=True)) if core in allowed]
    others = {}
    for process in psutil.process_iter(["cpu_percent", "cpu_affinity"]):  # which keeps the processes
        used = (process.info["cpu_percent"] or 0.0) / 100
        if process.pid == os.getpid():
            own = used
        elif allowed.intersection(process.info["cpu_affinity"] or allowed):
            others[process.pid] = used
    return len(percents), sum(percents) / 100 - own, others


def judged_load(count: int, load: float, others: Mapping[int, float]) -> Finding:
    """Check whether other processes use the CPU.

    count: the number of cores that this process may use. load: how many of them other processes use.
    others: how many each other process uses.
    """
    used, heaviest = max(((used, pid) for pid, used in others.items()), default=(0.0, 0))
    total = f"other processes use {max(0.0, load):.1f} of {units.counted(count, 'core')}"
    if used < BUSY_CORES and load < max(BUSY_CORES, BUSY_FRACTION * count):
        return good(total)
    mostly = f", mostly process {process_name(heaviest)}" if used >= NAMED_CORES else ""
    return warn(f"{total}{mostly}", "stop them, or wait until they end")


def cores(gpus: Sequence[Gpu]) -> Finding:
    """Report how many cores the ranks may use, and whether a quota limits their time."""
    allowed, usable, quota = len(os.sched_getaffinity(0)), core_count(), cpu_quota()
    if quota is not None and quota < 1:
        text = f"the cgroup's quota is {quota:.2g} cores, so the kernel pauses ranks many times a second"
        return bad(text, "give the container at least 2 cores")
    if quota is not None and quota < allowed:
        text = f"a quota of {quota:.2g} of {allowed} cores, so ranks are not pinned and may be paused"
        return warn(text, "give the container whole cores (cpuset), and no quota")
    if usable < 2:
        return warn("1, which two ranks share", "give this process at least 2 cores")
    return good(f"{usable}, without a quota")


def governor(gpus: Sequence[Gpu]) -> Finding:
    """Check whether the kernel keeps the cores at a high frequency."""
    governors = [_text(path) for path in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor")]
    if not governors:
        return good("not known, as in most virtual machines")
    slow = [name for name in governors if name != "performance"]
    if not slow:
        return good("performance")
    text = f"{' and '.join(sorted(set(slow)))} on {len(slow)} of {len(governors)} cores"
    return warn(text, "sudo cpupower frequency-set -g performance")


def memory(gpus: Sequence[Gpu]) -> Finding:
    """Check whether the memory is large enough for the ranks."""
    limit, ranks = memory_left(), max(len(gpus), LEAST_RANKS)
    free = min(psutil.virtual_memory().available, math.inf if limit is None else limit)
    if free >= ranks * RANK_BYTES:
        return good(f"{units.nbytes(free)} available")
    text = f"{units.nbytes(free)} available, {ranks} ranks need about {units.nbytes(ranks * RANK_BYTES)}"
    return warn(text, "end other programs, or raise the container's limit")


def shared_memory(gpus: Sequence[Gpu]) -> Finding:
    """Check whether /dev/shm is large enough for NCCL and for DataLoader workers."""
    advice, ranks = "mount more, or docker run --shm-size=8g", max(len(gpus), LEAST_RANKS)
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        return bad(f"cannot be used ({error.strerror})", advice)
    text = f"{units.nbytes(free)} free"
    if free < NCCL_SEGMENT_BYTES and gpus:
        return bad(f"{text}, NCCL needs {units.nbytes(NCCL_SEGMENT_BYTES)} for a connection", advice)
    if free < (needed := ranks * SHARED_BYTES_PER_RANK):
        return warn(f"{text}, loaders of {ranks} ranks need {units.nbytes(needed)}", advice)
    return good(text)


def huge_pages(gpus: Sequence[Gpu]) -> Finding:
    """Check whether CPU ranks get the huge pages that they request."""
    chosen = _text(HUGE_PAGES).partition("[")[2].partition("]")[0]
    if chosen == "never" and not gpus:
        text = "never, so times of the same code differ by 5% between processes, not by 2%"
        return warn(text, f"echo madvise | sudo tee {HUGE_PAGES}")
    return good(chosen or "not known")


def process_name(pid: int) -> str:
    """Return a process id, with the command if this container can see the process."""
    command = _text(Path(f"/proc/{pid}/comm"))
    return f"{pid} ({command})" if command else str(pid)


def _text(path: Path) -> str:
    """Return the text of one of the kernel's files, or an empty string if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
