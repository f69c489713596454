"""Checks of GPUs, their links, their settings and their other users, by what the driver reports.

CUDA is never initialised here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddpperf.doctor.findings import Finding, Level, Subject, bad, good, warn
from ddpperf.machine.gpu_description import Gpu
from ddpperf.machine.gpu_watch import SM_CLOCK, read_state
from ddpperf.machine.hardware import first_unmapped, gpu_handles, load_nvml, query_nvml
from ddpperf.machine.links import gpu_link
from ddpperf.results import units

MOST_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
BUSY_PERCENT = 5  # an idle GPU reports 0
DEVICES, DRIVER_FILES = Path("/dev"), "nvidia[0-9]*"  # one for each GPU


def present_gpus(gpus: Sequence[Gpu]) -> Finding:
    """Report which GPUs the ranks can use, and the version of the driver."""
    total = query_nvml("nvmlDeviceGetCount") if load_nvml() is not None else None
    if not gpus and total:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return good(Subject.GPUS, f"none of {total} is visible, because CUDA_VISIBLE_DEVICES={visible!r}")
    if not gpus:
        found = sorted(path.name for path in DEVICES.glob(DRIVER_FILES))
        if not found:
            return good(Subject.GPUS, "none; ranks run on the CPU")
        text = f"/dev/{found[0]} exists, but the driver does not answer"
        return bad(Subject.GPUS, text, "repair the driver until nvidia-smi lists the GPUs")
    names = " and ".join(sorted({gpu.name for gpu in gpus}))
    memory = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    each = f", {units.nbytes(min(memory))} each" if memory else ""
    hidden = "" if total in (None, len(gpus)) else f", {len(gpus)} of {total} are visible"
    return good(Subject.GPUS, f"{len(gpus)} x {names}{each}{hidden}, driver {gpus[0].driver or 'not known'}")


def gpu_settings(gpus: Sequence[Gpu]) -> list[Finding]:
    """Return the links and the settings of the GPUs, which stay as they are during a test run."""
    if not gpus:
        return []
    limits = sorted({f"{gpu.power_limit_watts or 0:.0f} W" for gpu in gpus if gpu.power_limit_watts})
    clocks = "reset them with sudo nvidia-smi -rac, or leave them equal for all runs"
    power = "set the default with sudo nvidia-smi -pl WATTS, or leave it equal for all runs"
    limit = f"limit {' and '.join(limits) or 'not known'}"
    return [
        _links(gpus),
        _judged(Subject.CLOCKS, gpus, _low_application_clock, clocks, "not held down"),
        _judged(Subject.POWER, gpus, _low_power_limit, power, limit),
    ]


def gpu_disturbances(gpus: Sequence[Gpu]) -> list[Finding]:
    """Report other processes on the GPUs, and clocks that are throttled now.

    A test run watches both in each round, so a run needs no such findings at its start.
    """
    if not gpus:
        return []
    load = "stop the process, or wait until it ends"
    clocks = "cool the GPU or raise its power limit, and see nvidia-smi -q -d PERFORMANCE"
    return [
        _judged(Subject.GPU_LOAD, gpus, _other_users, load, "no other process uses a GPU"),
        _judged(Subject.CLOCKS, gpus, _throttled, clocks, "not held down"),
    ]


def _links(gpus: Sequence[Gpu]) -> Finding:
    link = gpu_link(gpus)
    alone = "one GPU needs none" if len(gpus) == 1 else "not known"
    advice = "see nvidia-smi nvlink --status; restart the driver, or let the machine be repaired"
    fine = f"{link} to the other GPUs" if link else alone
    found = _judged(Subject.LINKS, gpus, _lost_links, advice, fine)
    if found.level is Level.GOOD and (pair := first_unmapped(gpus)) is not None:
        text = f"GPU {pair[0]} and GPU {pair[1]} cannot read each other's memory"
        return warn(Subject.LINKS, text, "tests that map GPU memory are skipped; see nvidia-smi topo -p2p r")
    return found


# --- what one GPU reports: an empty string is no problem, or not known


def _lost_links(handle: Any) -> str:
    states = [query_nvml("nvmlDeviceGetNvLinkState", handle, link) for link in range(MOST_NVLINKS)]
    active, known = states.count(1), len(states) - states.count(None)
    if active and active < known:
        return f"{active} of {known} NVLinks are active"
    width, most = (query_nvml(f"nvmlDeviceGet{which}PcieLinkWidth", handle) for which in ("Curr", "Max"))
    return f"x{width} of x{most} PCIe lanes are used" if width and most and width < most else ""


def _low_application_clock(handle: Any) -> str:
    chosen = query_nvml("nvmlDeviceGetApplicationsClock", handle, SM_CLOCK)
    default = query_nvml("nvmlDeviceGetDefaultApplicationsClock", handle, SM_CLOCK)
    return f"application clock {chosen} of {default} MHz" if chosen and default and chosen < default else ""


def _low_power_limit(handle: Any) -> str:
    limit = query_nvml("nvmlDeviceGetEnforcedPowerLimit", handle)
    default = query_nvml("nvmlDeviceGetPowerManagementDefaultLimit", handle)
    if limit is None or default is None or limit >= default:
        return ""
    return f"{limit / 1e3:.0f} W, the default is {default / 1e3:.0f} W"


def _other_users(handle: Any) -> str:
    names = ", ".join(map(_process_name, sorted(read_state(handle).processes)))
    load = query_nvml("nvmlDeviceGetUtilizationRates", handle)
    busy = f"{load.gpu}% busy" if load is not None and load.gpu >= BUSY_PERCENT else ""
    return ", ".join(filter(None, (busy, f"used by process {names}" if names else "")))


def _process_name(pid: int) -> str:
    """Return a process id, with the command if this container can see the process."""
    with contextlib.suppress(OSError):
        return f"{pid} ({Path(f'/proc/{pid}/comm').read_text('utf-8', 'replace').strip()})"
    return str(pid)


def _throttled(handle: Any) -> str:
    reasons = ", ".join(sorted(read_state(handle).reasons))
    return f"throttled now ({reasons})" if reasons else ""


# --- one finding for all GPUs


def _judged(
    subject: Subject, gpus: Sequence[Gpu], problem: Callable[[Any], str], advice: str, fine: str
) -> Finding:
    """Return a warning that names the GPUs with a problem, or a good finding if there is none.

    problem: returns the problem of one GPU, if it has one.
    """
    numbers: dict[str, list[str]] = {}  # of GPUs, in CUDA's order
    for index, handle in gpu_handles(gpu.uuid for gpu in gpus).items():
        if text := problem(handle):
            numbers.setdefault(text, []).append(str(index))
    if not numbers:
        return good(subject, fine)
    named = [f"GPU{'s' * (len(those) > 1)} {', '.join(those)}: {text}" for text, those in numbers.items()]
    return warn(subject, "; ".join(named), advice)
