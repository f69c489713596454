"""Checks of CPU load, cores, memory and this folder, by what the kernel and git report."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpperf.doctor.findings import Finding, Subject, bad, good, warn
from ddpperf.io.private_folders import SHARED_MEMORY
from ddpperf.machine.cgroup import cpu_quota, memory_left
from ddpperf.machine.git import NO_COMMIT, commit
from ddpperf.machine.hardware import core_count
from ddpperf.results import units

CPUS = Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BUSY_CORES = 0.5  # used by others: a rank on this core takes about twice as long
BUSY_FRACTION = 0.1  # of all cores, on machines whose services use more than BUSY_CORES
NAMED_CORES = 0.2  # the heaviest process is named if it uses more
STOLEN_FRACTION = 0.05
RANK_BYTES = 1e9  # a rank of two with resnet18 and batch size 32 uses 0.8 GB
# Batches that the workers of one rank's loader hold: 4 workers, 2 batches of 128 x 3 x 224 x 224 bytes
SHARED_BYTES_PER_RANK = 160e6
NCCL_SEGMENT_BYTES = 10e6  # NCCL cannot connect two ranks through memory with less


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """The CPU seconds that were used until one moment.

    busy_seconds: on the cores that this process may use, by all other processes. stolen_seconds: what
    the hypervisor gave to other machines. process_seconds: of each other process on these cores.
    """

    monotonic_seconds: float
    cores: int
    busy_seconds: float
    stolen_seconds: float
    process_seconds: Mapping[int, float]


def cpu_times() -> CpuTimes:
    """Return the CPU times until now. This process counts as idle."""
    import psutil  # here, as the doctor runs where it cannot be imported

    allowed = os.sched_getaffinity(0)
    times = [used for core, used in enumerate(psutil.cpu_times(percpu=True)) if core in allowed]
    own = psutil.Process()
    found = psutil.process_iter(["cpu_times", "cpu_affinity"])
    others = [process for process in found if process.info["cpu_times"] and process.pid != own.pid]
    return CpuTimes(
        monotonic_seconds=time.monotonic(),
        cores=len(times),
        busy_seconds=sum(core.user + core.nice + core.system + core.irq + core.softirq for core in times)
        - sum(own.cpu_times()[:2]),
        stolen_seconds=sum(core.steal for core in times),
        process_seconds={
            process.pid: sum(process.info["cpu_times"][:2])
            for process in others
            if allowed.intersection(process.info["cpu_affinity"] or allowed)
        },
    )


def cpu_load(seconds: float) -> Finding:
    """Watch the CPU for some seconds, and report whether other processes use it."""
    try:
        before = cpu_times()
        time.sleep(seconds)
        return judged_load(before, cpu_times())
    except Exception:  # psutil is missing, or cannot read what this kernel reports
        return good(Subject.CPU_LOAD, "not known")


def judged_load(before: CpuTimes, now: CpuTimes) -> Finding:
    """Check whether other processes used the CPU between two moments."""
    elapsed, cores = now.monotonic_seconds - before.monotonic_seconds, units.counted(now.cores, "core")
    load = max(0.0, (now.busy_seconds - before.busy_seconds) / elapsed)
    stolen = (now.stolen_seconds - before.stolen_seconds) / elapsed
    uses = {
        pid: (used - before.process_seconds.get(pid, 0.0)) / elapsed
        for pid, used in now.process_seconds.items()
    }
    used, heaviest = max(((used, pid) for pid, used in uses.items()), default=(0.0, 0))
    total = f"other processes use {load:.1f} of {cores}"
    if used >= BUSY_CORES or load >= max(BUSY_CORES, BUSY_FRACTION * now.cores):
        name = _text(Path(f"/proc/{heaviest}/comm")) or "ended"
        mostly = f", mostly {heaviest} ({name})" if used >= NAMED_CORES else ""
        return warn(Subject.CPU_LOAD, f"{total}{mostly}", "stop them, or wait until they end")
    if stolen >= STOLEN_FRACTION * now.cores > 0:
        text = f"steal time: the hypervisor takes {stolen:.1f} of {cores}"
        return warn(Subject.CPU_LOAD, text, "use a machine that shares its cores with no other")
    return good(Subject.CPU_LOAD, total)


def cores() -> Finding:
    """Report how many cores the ranks may use, and whether a quota limits their time."""
    allowed, usable, quota = len(os.sched_getaffinity(0)), core_count(), cpu_quota()
    if quota is not None and quota < 1:
        text = f"the cgroup's quota is {quota:.2g} cores, so ranks stop many times in a second"
        return bad(Subject.CORES, text, "give the container at least 2 cores")
    if quota is not None and quota < allowed:
        text = f"a quota of {quota:.2g} of {allowed} cores, so ranks are not pinned and may be stopped"
        return warn(Subject.CORES, text, "give the container whole cores (cpuset), and no quota")
    if usable < 2:
        return warn(Subject.CORES, "1, which two ranks share", "give this process at least 2 cores")
    return good(Subject.CORES, f"{usable}, without a quota")


def governor() -> Finding:
    """Check whether the kernel keeps the cores at a high frequency."""
    governors = [_text(path) for path in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor")]
    if not governors:
        return good(Subject.GOVERNOR, "not known, as in most virtual machines")
    slow = [name for name in governors if name != "performance"]
    if not slow:
        return good(Subject.GOVERNOR, "performance")
    text = f"{' and '.join(sorted(set(slow)))} on {len(slow)} of {len(governors)} cores"
    return warn(Subject.GOVERNOR, text, "sudo cpupower frequency-set -g performance")


def memory(ranks: int) -> Finding:
    """Check whether the memory is large enough for this number of ranks."""
    left = [memory_left()]
    with contextlib.suppress(Exception):  # as in cpu_load
        import psutil

        left.append(psutil.virtual_memory().available)
    known = [nbytes for nbytes in left if nbytes is not None]
    if not known:
        return good(Subject.MEMORY, "not known")
    text = f"{units.nbytes(min(known))} available"
    if min(known) >= ranks * RANK_BYTES:
        return good(Subject.MEMORY, text)
    needs = f"{units.counted(ranks, 'rank')} need about {units.nbytes(ranks * RANK_BYTES)}"
    return warn(Subject.MEMORY, f"{text}, {needs}", "end other programs, or raise the container's limit")


def shared_memory(ranks: int, device: str) -> Finding:
    """Check whether /dev/shm is large enough for NCCL and for DataLoader workers."""
    advice = "mount more, or docker run --shm-size=8g"
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        return bad(Subject.SHARED_MEMORY, f"cannot be used ({error.strerror})", advice)
    text = f"{units.nbytes(free)} free"
    if free < NCCL_SEGMENT_BYTES and device == "cuda":
        needs = f"NCCL needs {units.nbytes(NCCL_SEGMENT_BYTES)} for a connection"
        return bad(Subject.SHARED_MEMORY, f"{text}, {needs}", advice)
    if free < ranks * SHARED_BYTES_PER_RANK:
        needs = units.nbytes(ranks * SHARED_BYTES_PER_RANK)
        return warn(
            Subject.SHARED_MEMORY,
            f"{text}, loaders of {units.counted(ranks, 'rank')} need {needs}",
            advice,
        )
    return good(Subject.SHARED_MEMORY, text)


def huge_pages(device: str) -> Finding:
    """Check whether CPU ranks get the huge pages that they request."""
    chosen = _text(HUGE_PAGES).partition("[")[2].partition("]")[0]
    if chosen == "never" and device == "cpu":
        text = "never, so processes of the same code differ by 5% instead of 2%"
        return warn(Subject.HUGE_PAGES, text, f"echo madvise | sudo tee {HUGE_PAGES}")
    return good(Subject.HUGE_PAGES, chosen or "not known")


def repository(folder: Path) -> Finding:
    """Check whether git knows the commit of a folder, which comparisons check out."""
    if (name := commit(folder)) == NO_COMMIT:
        text = "this folder has no commit, so no run can be compared with a stored run's code"
        return warn(Subject.GIT, text, "install git, and start in a repository with a commit")
    changed = ", and changes that are not committed" if name.endswith("+") else ""
    return good(Subject.GIT, f"commit {name.rstrip('+')}{changed}")


def _text(path: Path) -> str:
    """Return the text of one of the kernel's files, or an empty string if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
