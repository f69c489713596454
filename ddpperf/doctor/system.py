"""What the kernel reports about CPU cores, memory, limits and folders."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpperf.doctor.findings import Finding, Subject, bad, good, warn
from ddpperf.io.private_folders import SHARED_MEMORY
from ddpperf.machine.cgroup import cpu_quota, memory_left
from ddpperf.machine.hardware import computes_bf16, core_count
from ddpperf.results import units

PROC, CPUS = Path("/proc"), Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
BUSY_CORES = 0.5  # used by others: a rank on this core takes about twice as long
BUSY_FRACTION = 0.1  # of all cores, on machines whose services use more than BUSY_CORES
NAMED_CORES = 0.2  # the heaviest process is named if it uses more
STOLEN_FRACTION = 0.05
RANK_BYTES = 1e9  # a rank of two with resnet18 and batch size 32 uses 0.8 GB
# Batches that the workers of one rank's loader hold: 4 workers, 2 batches of 128 x 3 x 224 x 224 bytes
SHARED_BYTES_PER_RANK = 160e6
NCCL_SEGMENT_BYTES = 10e6  # NCCL cannot connect two ranks through memory with less
FEW_FILES = 1024  # the usual limit; a rank uses 20, and 50 with CUDA, before NCCL and loaders
LEAST_FILES = 24  # two CPU ranks fail with 20


# --- CPU load


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """The CPU seconds that were used until one moment.

    busy_seconds: on the cores that this process may use, by all processes. stolen_seconds: what the
    hypervisor gave to other machines. process_seconds: of each process, except this one.
    """

    monotonic_seconds: float
    cores: int
    busy_seconds: float
    stolen_seconds: float
    process_seconds: Mapping[int, float]


def cpu_times() -> CpuTimes:
    """Return the CPU times until now. This process counts as idle. Raises OSError or ValueError."""
    allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy = stolen = cores = 0
    for line in (PROC / "stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in allowed:
            user, nice, system, _, _, hard_irq, soft_irq, steal = map(int, ticks[:8])
            busy += user + nice + system + hard_irq + soft_irq
            stolen += steal
            cores += 1
    if not cores:
        raise ValueError("the kernel reports the times of other cores only")
    own = os.times()
    return CpuTimes(
        monotonic_seconds=time.monotonic(),
        cores=cores,
        busy_seconds=busy / TICKS_PER_SECOND - own.user - own.system,
        stolen_seconds=stolen / TICKS_PER_SECOND,
        process_seconds=_process_seconds(),
    )


def _process_seconds() -> dict[int, float]:
    found = {}
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            found[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
    found.pop(os.getpid(), None)
    return found


def cpu_load(seconds: float) -> Finding:
    """Watch the CPU for some seconds, and return whether other processes use it."""
    try:
        before = cpu_times()
        time.sleep(seconds)
        return judged_load(before, cpu_times())
    except (OSError, ValueError):
        return good(Subject.LOAD, "not known")


def judged_load(before: CpuTimes, now: CpuTimes) -> Finding:
    """Return whether other processes used the CPU between two moments."""
    elapsed = now.monotonic_seconds - before.monotonic_seconds
    load = max(0.0, (now.busy_seconds - before.busy_seconds) / elapsed)
    stolen = (now.stolen_seconds - before.stolen_seconds) / elapsed
    uses = {
        pid: (used - before.process_seconds.get(pid, 0.0)) / elapsed
        for pid, used in now.process_seconds.items()
    }
    heaviest = max(filter(_may_meet, uses), key=lambda pid: uses[pid], default=0)
    used = uses.get(heaviest, 0.0)
    total = f"other processes use {load:.1f} of {units.counted(now.cores, 'core')}"
    if used >= BUSY_CORES or load >= max(BUSY_CORES, BUSY_FRACTION * now.cores):
        mostly = f", mostly {heaviest} ({_command(heaviest)})" if used >= NAMED_CORES else ""
        return warn(Subject.LOAD, f"{total}{mostly}", "stop them, or wait until they end")
    if stolen >= STOLEN_FRACTION * now.cores:
        text = f"steal time: the hypervisor takes {stolen:.1f} of {units.counted(now.cores, 'core')}"
        return warn(Subject.LOAD, text, "use a machine that shares its cores with no other")
    return good(Subject.LOAD, total)


def _may_meet(pid: int) -> bool:
    """Return whether a process may run on a core that this process may use, too."""
    with contextlib.suppress(OSError):
        return bool(os.sched_getaffinity(pid) & os.sched_getaffinity(0))
    return True


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()
    return "ended"


# --- CPU cores and memory


def cores() -> Finding:
    """Return how many cores the ranks may use, and whether a quota limits their time."""
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
    """Return whether the kernel keeps the cores at a high frequency."""
    governors = _texts(CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor"))
    if not governors:
        return good(Subject.GOVERNOR, "not known, as in most virtual machines")
    slow = sorted(set(governors) - {"performance"})
    if not slow:
        return good(Subject.GOVERNOR, "performance")
    text = f"{' and '.join(slow)} on {governors.count(slow[0])} of {len(governors)} cores"
    return warn(Subject.GOVERNOR, text, "sudo cpupower frequency-set -g performance")


def turbo() -> Finding:
    """Return whether cores run at higher frequencies while few of them are busy.

    Turbo is how most machines train, so it is no warning. It lowers the speedup of CPU ranks.
    """
    off = {"0": False, "1": True}.get("".join(_texts([CPUS / "intel_pstate" / "no_turbo"])))
    if off is None:
        off = {"0": True, "1": False}.get("".join(_texts([CPUS / "cpufreq" / "boost"])))
    if off is None:
        return good(Subject.TURBO, "not known, as in most virtual machines")
    return good(Subject.TURBO, "off" if off else "on: one busy core is faster than many busy cores")


def bf16() -> Finding:
    """Return whether the CPU computes in bf16 quickly."""
    if computes_bf16():
        return good(Subject.BF16, "the CPU has instructions for bf16")
    return good(Subject.BF16, "the CPU has no instructions for bf16, so bf16 is slower than fp32 there")


def memory(ranks: int) -> Finding:
    """Return whether the memory is large enough for some ranks."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        text = f"a process may reserve {units.nbytes(limit)} at most, and torch may need more"
        return warn(Subject.MEMORY, text, "ulimit -v unlimited")
    left = [memory_left()]
    with contextlib.suppress(OSError, ValueError, IndexError):
        counted = (PROC / "meminfo").read_text().partition("MemAvailable:")[2]
        left.append(int(counted.split()[0]) * 1024)
    known = [nbytes for nbytes in left if nbytes is not None]
    if not known:
        return good(Subject.MEMORY, "not known")
    text = f"{units.nbytes(min(known))} available"
    if min(known) >= ranks * RANK_BYTES:
        return good(Subject.MEMORY, text)
    needs = f"{units.counted(ranks, 'rank')} need about {units.nbytes(ranks * RANK_BYTES)}"
    return warn(Subject.MEMORY, f"{text}, {needs}", "end other programs, or raise the container's limit")


def huge_pages(device: str) -> Finding:
    """Return whether CPU ranks get their memory in huge pages, which they ask for."""
    words = "".join(_texts([HUGE_PAGES]))
    chosen = words.partition("[")[2].partition("]")[0]
    if not chosen:
        return good(Subject.HUGE_PAGES, "not known")
    if chosen == "never" and device == "cpu":
        text = "never, so processes of the same code differ by 5% instead of 2%"
        return warn(Subject.HUGE_PAGES, text, f"echo madvise | sudo tee {HUGE_PAGES}")
    return good(Subject.HUGE_PAGES, chosen)


# --- limits and folders


def shared_memory(ranks: int, device: str) -> Finding:
    """Return whether /dev/shm is large enough for NCCL and for the workers of loaders."""
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
        text = f"{text}, loaders of {units.counted(ranks, 'rank')} need {needs}"
        return warn(Subject.SHARED_MEMORY, text, advice)
    return good(Subject.SHARED_MEMORY, text)


def open_files() -> Finding:
    """Return whether each rank may open enough files, sockets and devices."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        return good(Subject.FILES, "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    enough = hard == resource.RLIM_INFINITY or hard >= FEW_FILES
    advice = f"ulimit -n {FEW_FILES}" if enough else "raise the hard limit in limits.conf"
    if soft < LEAST_FILES:
        return bad(Subject.FILES, f"at most {soft}, so ranks cannot start", advice)
    text = f"at most {soft}, too few for NCCL and loader workers"
    return warn(Subject.FILES, text, advice)


def folders() -> list[Finding]:
    """Return whether files can be written where ranks, compilers and test runs write them."""
    return [
        _writable(Subject.HOME, os.path.expanduser("~"), "no compiler cache", "set another HOME"),
        _temporary(),
        _project(),
    ]


def _project() -> Finding:
    advice = "start in another folder"
    try:
        return _writable(Subject.PROJECT, os.getcwd(), "no run is stored", advice)
    except FileNotFoundError:
        return bad(Subject.PROJECT, "it was removed, so torch cannot be imported", advice)


def _temporary() -> Finding:
    try:
        return good(Subject.TEMPORARY, f"{tempfile.gettempdir()} is writable")
    except FileNotFoundError:  # Python has tried to write to each folder that it knows
        advice = "make /tmp writable and make room there, or set TMPDIR to another folder"
        return bad(Subject.TEMPORARY, "none is writable, so ranks cannot start", advice)


def _writable(subject: Subject, folder: str, without: str, advice: str) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return good(subject, f"{folder} is writable")
    except OSError as error:
        return warn(subject, f"{folder} is not writable ({error.strerror}): {without}", advice)


def loopback() -> Finding:
    """Return whether ranks can meet at 127.0.0.1, where they listen and connect."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1).close()
    except OSError as error:
        text = f"ranks cannot meet there ({error.strerror or error})"
        advice = "bring lo up, with 127.0.0.1/8"
        return bad(Subject.LOOPBACK, text, advice)
    return good(Subject.LOOPBACK, "ranks can meet there")


def _texts(paths: Iterable[Path]) -> list[str]:
    """Return the texts of those of the kernel's files that can be read."""
    texts = []
    for path in paths:
        with contextlib.suppress(OSError):
            texts.append(path.read_text().strip())
    return texts
