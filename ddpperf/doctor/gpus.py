"""What the driver reports about GPUs, their links, their settings and their other users.

CUDA is never initialised here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpperf.doctor.findings import Finding, Subject, bad, good, warn
from ddpperf.machine.gpu_watch import SM_CLOCK, read_state
from ddpperf.machine.hardware import Gpu, first_unmapped, gpu_handles, load_nvml, query_nvml
from ddpperf.machine.links import pcie_rate
from ddpperf.results import units

MOST_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
BUSY_PERCENT = 5  # an idle GPU reports 0
LOW_CLOCK = 0.95  # of the GPU's highest clock; clocks under a light load reach it
UNCORRECTED, VOLATILE = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
DEVICES, DRIVER_FILES = Path("/dev"), "nvidia[0-9]*"  # one for each GPU

Handles = Mapping[int, Any]  # the driver's handle of each GPU, by its number in CUDA's order


def present_gpus(gpus: Sequence[Gpu]) -> list[Finding]:
    """Return which GPUs the ranks can use, and the driver."""
    total = query_nvml("nvmlDeviceGetCount") if load_nvml() is not None else None
    if not gpus and total:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [good(Subject.GPUS, f"none of {total} is visible, because CUDA_VISIBLE_DEVICES={visible!r}")]
    if not gpus:
        found = sorted(path.name for path in DEVICES.glob(DRIVER_FILES))
        if not found:
            return [good(Subject.GPUS, "none; ranks run on the CPU")]
        text = f"/dev/{found[0]} exists, but the driver does not answer ({_why_no_driver()})"
        return [bad(Subject.GPUS, text, "repair the driver until nvidia-smi lists the GPUs")]
    names = sorted({gpu.name for gpu in gpus})
    hidden = "" if total in (None, len(gpus)) else f"; {len(gpus)} of {total} are visible"
    memory = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    text = f"{len(gpus)} x {' and '.join(names)}" + (f", {units.nbytes(min(memory))} each" if memory else "")
    version = query_nvml("nvmlSystemGetCudaDriverVersion")
    cuda = f", for CUDA up to {version // 1000}.{version % 1000 // 10}" if version else ""
    return [
        good(Subject.GPUS, text + hidden),
        good(Subject.DRIVER, f"{gpus[0].driver or 'version not known'}{cuda}"),
    ]


def _why_no_driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        return str(error) or type(error).__name__
    return "it lists no GPU"


def gpu_settings(gpus: Sequence[Gpu]) -> list[Finding]:
    """Return the links and the settings of the GPUs, which stay as they are during a test run."""
    handles = gpu_handles(gpu.uuid for gpu in gpus)
    if not handles:
        return []
    links = {index: _nvlink_text(gpus[index], handle) for index, handle in handles.items()}
    return [
        _judged(
            Subject.NVLINK,
            _problems(handles, _inactive_links),
            "see nvidia-smi nvlink --status; restart the driver, or let the machine be repaired",
            _by_gpu(links),
        ),
        _judged(
            Subject.PCIE,
            _problems(handles, _narrow_pcie),
            "seat the card again, or let the machine be repaired",
            _by_gpu({index: _pcie_text(handle) for index, handle in handles.items()}),
        ),
        *_peers(gpus),
        _judged(
            Subject.CLOCKS,
            _problems(handles, _low_application_clock),
            "reset them with sudo nvidia-smi -rac, or leave them equal for all runs",
            "application clocks are the default",
        ),
        _judged(
            Subject.POWER,
            _problems(handles, _low_power_limit),
            "set the default with sudo nvidia-smi -pl WATTS, or leave it equal for all runs",
            _by_gpu({index: _power_text(gpus[index]) for index in handles}),
        ),
        _judged(
            Subject.PERSISTENCE,
            _problems(handles, _not_persistent),
            "sudo nvidia-smi -pm 1",
            "on",
        ),
        _judged(
            Subject.ECC,
            _problems(handles, _uncorrected_errors),
            "reset the GPU, and let it be replaced if the errors come back",
            "no uncorrected memory errors since the driver started",
        ),
        _judged(
            Subject.MIG,
            _problems(handles, _is_divided),
            "sudo nvidia-smi -mig 0, because ranks of one group cannot use parts of GPUs",
            "off",
        ),
    ]


def gpu_disturbances(gpus: Sequence[Gpu]) -> list[Finding]:
    """Return who else uses the GPUs now, and whether their clocks are held down now.

    A test run watches both in each round, so a run needs no such findings at its start.
    """
    handles = gpu_handles(gpu.uuid for gpu in gpus)
    if not handles:
        return []
    return [
        _judged(
            Subject.GPU_PROCESSES,
            _problems(handles, _other_users),
            "stop the process, or wait until it ends",
            "no other process uses a GPU",
        ),
        _judged(
            Subject.THROTTLING,
            _problems(handles, _throttled),
            "cool the GPU or raise its power limit, and see nvidia-smi -q -d PERFORMANCE",
            "none now",
        ),
    ]


def loaded_clocks(clocks: Mapping[int, tuple[int, int]]) -> list[Finding]:
    """Return whether the GPUs reach their highest clocks.

    clocks: by the GPU's number, MHz under a light load and the highest. The driver does not report
    locked clocks, so a GPU must run to show them.
    """
    low = {
        index: f"{megahertz} of {highest} MHz under a light load"
        for index, (megahertz, highest) in clocks.items()
        if megahertz < LOW_CLOCK * highest
    }
    fine = _by_gpu({index: f"{megahertz} MHz" for index, (megahertz, _) in clocks.items()})
    advice = "unlock them with sudo nvidia-smi -rgc and -rac, or leave them equal for all runs"
    return [_judged(Subject.CLOCKS, low, advice, f"{fine} under a light load")] if clocks else []


# --- what one GPU reports: an empty string is no problem, or not known


def _inactive_links(handle: Any) -> str:
    states = _link_states(handle)
    inactive = len(states) - sum(states)
    return f"{sum(states)} of {len(states)} NVLinks are active" if any(states) and inactive else ""


def _link_states(handle: Any) -> list[bool]:
    states = [query_nvml("nvmlDeviceGetNvLinkState", handle, link) for link in range(MOST_NVLINKS)]
    return [bool(state) for state in states if state is not None]


def _nvlink_text(gpu: Gpu, handle: Any) -> str:
    if not gpu.nvlinks:
        return "none active" if _link_states(handle) else "none"
    rate = gpu.nvlink_bytes_per_second
    nominal = f"{units.bandwidth(rate)} in one direction" if rate else "at a rate that is not known"
    return f"{units.counted(gpu.nvlinks, 'link')}, {nominal}"


def _pcie(handle: Any, which: str) -> tuple[int | None, int | None]:
    """Return PCIe generation and width; which: Curr or Max, with this GPU in this machine."""
    generation = query_nvml(f"nvmlDeviceGet{which}PcieLinkGeneration", handle)
    return generation, query_nvml(f"nvmlDeviceGet{which}PcieLinkWidth", handle)


def _narrow_pcie(handle: Any) -> str:
    _, width = _pcie(handle, "Curr")
    _, most = _pcie(handle, "Max")
    return f"x{width} of x{most} lanes are used" if width and most and width < most else ""


def _pcie_text(handle: Any) -> str:
    generation, width = _pcie(handle, "Max")
    now, _ = _pcie(handle, "Curr")
    if not generation or not width:
        return "not known"
    rate = pcie_rate(generation, width)
    nominal = f", {rate / 1e9:.0f} GB/s in one direction" if rate else ""
    saving = f" (now {now}.0, to save power)" if now and now < generation else ""
    return f"{generation}.0 x{width}{nominal}{saving}"


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


def _power_text(gpu: Gpu) -> str:
    return f"{gpu.power_limit_watts:.0f} W" if gpu.power_limit_watts is not None else "not known"


def _not_persistent(handle: Any) -> str:
    off = query_nvml("nvmlDeviceGetPersistenceMode", handle) == 0
    return "off, so the driver starts again when the first process uses the GPU" if off else ""


def _uncorrected_errors(handle: Any) -> str:
    errors = query_nvml("nvmlDeviceGetTotalEccErrors", handle, UNCORRECTED, VOLATILE)
    return f"{units.counted(errors, 'uncorrected memory error')} since the driver started" if errors else ""


def _is_divided(handle: Any) -> str:
    mode = query_nvml("nvmlDeviceGetMigMode", handle)
    return "the GPU is divided" if mode and mode[0] else ""


def _other_users(handle: Any) -> str:
    pids = sorted(read_state(handle).processes)
    load = query_nvml("nvmlDeviceGetUtilizationRates", handle)
    busy = f"{load.gpu}% busy" if load is not None and load.gpu >= BUSY_PERCENT else ""
    users = f"used by process{'es' * (len(pids) > 1)} {', '.join(map(_process_name, pids))}" if pids else ""
    return ", ".join(filter(None, (busy, users)))


def _process_name(pid: int) -> str:
    """Return a process id, with the command if this container can see the process."""
    with contextlib.suppress(OSError):
        return f"{pid} ({Path(f'/proc/{pid}/comm').read_text('utf-8', 'replace').strip()})"
    return str(pid)


def _throttled(handle: Any) -> str:
    return ", ".join(sorted(read_state(handle).reasons))


def _peers(gpus: Sequence[Gpu]) -> list[Finding]:
    if len(gpus) < 2:
        return []
    if (pair := first_unmapped(gpus)) is None:
        return [good(Subject.PEERS, "each GPU can read the memory of all others")]
    text = f"GPU {pair[0]} and GPU {pair[1]} cannot read each other's memory"
    return [warn(Subject.PEERS, text, "tests that map GPU memory are skipped; see nvidia-smi topo -p2p r")]


# --- one finding for all GPUs


def _problems(handles: Handles, problem: Callable[[Any], str]) -> dict[int, str]:
    return {index: text for index, handle in handles.items() if (text := problem(handle))}


def _judged(subject: Subject, problems: Mapping[int, str], advice: str, fine: str) -> Finding:
    if not problems:
        return good(subject, fine)
    named = "; ".join(f"{_names(those)}: {text}" for text, those in _grouped(problems).items())
    return warn(subject, named, advice)


def _by_gpu(texts: Mapping[int, str]) -> str:
    grouped = _grouped(texts)
    if len(grouped) == 1:
        return f"{next(iter(grouped))}{' each' * (len(texts) > 1)}"
    return "; ".join(f"{_names(those)}: {text}" for text, those in grouped.items())


def _grouped(texts: Mapping[int, str]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for index, text in texts.items():
        grouped.setdefault(text, []).append(index)
    return grouped


def _names(indices: Sequence[int]) -> str:
    return f"GPU{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"
