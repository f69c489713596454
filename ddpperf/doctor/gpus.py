"""Checks of GPUs, their links, their settings and their other users, from what the driver reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from ddpperf.doctor.cpu_and_memory import process_name
from ddpperf.doctor.findings import Finding, bad, good, warn
from ddpperf.machine.gpu_description import Gpu, ask, gpu_handles, load_nvml
from ddpperf.machine.gpu_watch import read_state
from ddpperf.machine.links import gpu_link
from ddpperf.results import units

BUSY_PERCENT = 5  # an idle GPU reports 0
DEVICES, DRIVER_FILES = Path("/dev"), "nvidia[0-9]*"  # one for each GPU


def present(gpus: Sequence[Gpu]) -> Finding:
    """Report which GPUs the ranks can use, the link between them, and the version of the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    of = "" if visible is None else f", with CUDA_VISIBLE_DEVICES={visible!r}"
    if not gpus:
        if (found := sorted(path.name for path in DEVICES.glob(DRIVER_FILES))) and not load_nvml():
            text = f"/dev/{found[0]} exists, but the driver does not answer"
            return bad(text, "repair the driver until nvidia-smi lists the GPUs")
        return good(f"none{of}; ranks run on the CPU")
    names = " and ".join(sorted({gpu.name for gpu in gpus}))
    memory = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    each = f", {units.nbytes(min(memory))} each" if memory else ""
    link = f", {rate} to the others" if (rate := gpu_link(gpus)) else ""
    return good(f"{len(gpus)} x {names}{each}{link}{of}, driver {gpus[0].driver or 'not known'}")


def _check(gpus: Sequence[Gpu], problem: Callable[[Any], str], fine: str, advice: str) -> Finding:
    """Return a warning that names the GPUs with a problem, or a good finding with the text `fine`.

    problem: a function from NVML's handle of a GPU to a text about its problem, which is empty if
    the GPU has no problem or NVML does not say.
    """
    numbers: dict[str, list[str]] = {}  # of GPUs, in CUDA's order
    for index, handle in enumerate(gpu_handles(gpus)):
        if text := problem(handle):
            numbers.setdefault(text, []).append(str(index))
    named = [f"GPU {', '.join(those)}: {text}" for text, those in numbers.items()]
    return warn("; ".join(named), advice) if named else good(fine)


def lost_links(handle: Any) -> str:
    links = range(pynvml.NVML_NVLINK_MAX_LINKS)
    states = [ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in links]
    active, known = states.count(pynvml.NVML_FEATURE_ENABLED), len(states) - states.count(None)
    if active and active < known:
        return f"{active} of {known} NVLinks are active"
    width = ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    most = ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    return f"x{width} of x{most} PCIe lanes are used" if width and most and width < most else ""


def low_power_limit(handle: Any) -> str:
    limit = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    default = ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    if limit is None or default is None or limit >= default:
        return ""
    return f"{limit / 1e3:.0f} W, the default is {default / 1e3:.0f} W"


def other_users(handle: Any) -> str:
    names = ", ".join(map(process_name, sorted(read_state(handle).processes)))
    rates = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    busy = f"{rates.gpu}% busy" if rates is not None and rates.gpu >= BUSY_PERCENT else ""
    return ", ".join(filter(None, (busy, f"used by process {names}" if names else "")))


def throttled_now(handle: Any) -> str:
    reasons = ", ".join(sorted(read_state(handle).reasons))
    return f"throttled now ({reasons})" if reasons else ""


REPAIR = "see nvidia-smi nvlink --status; restart the driver, or let the machine be repaired"
SET_LIMIT = "set the default with sudo nvidia-smi -pl WATTS, or leave it equal for all runs"
COOL = "cool the GPU or raise its power limit, and see nvidia-smi -q -d PERFORMANCE"
STOP = "stop it, or wait until it ends"
SETTINGS = {
    "GPU links": partial(_check, problem=lost_links, fine="all in use", advice=REPAIR),
    "GPU power": partial(_check, problem=low_power_limit, fine="the default limit", advice=SET_LIMIT),
}
DISTURBANCES = {  # a test run watches these in each round
    "GPU load": partial(_check, problem=other_users, fine="no other process uses a GPU", advice=STOP),
    "GPU clocks": partial(_check, problem=throttled_now, fine="not throttled", advice=COOL),
}
