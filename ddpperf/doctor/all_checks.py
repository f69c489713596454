"""All checks of the doctor, and the fast ones that each test run makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ddpperf.doctor import cpu_and_memory, software
from ddpperf.doctor import gpus as gpu_checks
from ddpperf.doctor.findings import Finding, Level, warn
from ddpperf.doctor.two_ranks import TWO_RANKS, rank_findings
from ddpperf.errors import Refused
from ddpperf.machine.device_lock import lock_devices
from ddpperf.machine.gpu_description import Gpu
from ddpperf.machine.hardware import core_count
from ddpperf.results import units

Checks = Mapping[str, Callable[[Sequence[Gpu]], Finding]]  # by subject, in the order of the report

# Together they take less than 0.5 s.
QUICK: Checks = {
    "CPU load": cpu_and_memory.cpu_load,
    "CPU cores": cpu_and_memory.cores,
    "memory": cpu_and_memory.memory,
    "/dev/shm": cpu_and_memory.shared_memory,
    "variables": software.variables,
    "governor": cpu_and_memory.governor,
    "huge pages": cpu_and_memory.huge_pages,
}
END_SECONDS = 1.5  # to start Python, to end ranks that hang, and to print


def all_findings(gpus: Sequence[Gpu], seconds: float) -> list[Finding]:
    """Make all checks in about `seconds`, and return a finding for each subject.

    gpus: the GPUs that ranks can use; without one, ranks use the CPU. The CPU's load is watched before
    the checks that use the CPU.
    """
    end = time.monotonic() + seconds - END_SECONDS
    of_gpus = {**gpu_checks.SETTINGS, **gpu_checks.DISTURBANCES} if gpus else {}
    slow = {
        "git": software.repository,
        "torchvision": software.torchvision,
        "compiler": software.compiler,
    }
    checks: Checks = {"GPUs": gpu_checks.present, **of_gpus, **QUICK, **slow}
    found = {subject: check(gpus) for subject, check in checks.items()}
    try:
        with lock_devices([gpu.uuid for gpu in gpus] or ["cpu"]):
            found |= rank_findings(gpus, max(1.0, end - time.monotonic()))
    except Refused as refused:
        found[TWO_RANKS] = warn("not tried", str(refused))
    return [replace(finding, subject=subject) for subject, finding in found.items()]


def run_findings(gpus: Sequence[Gpu]) -> list[Finding]:
    """Run the checks that take less than 0.5 s, and return the problems, the worst first.

    gpus: the GPUs of the ranks; empty on the CPU.
    """
    checks: Checks = {**QUICK, **(gpu_checks.SETTINGS if gpus else {})}
    found = [replace(check(gpus), subject=subject) for subject, check in checks.items()]
    return [finding for level in (Level.BAD, Level.WARNING) for finding in found if finding.level is level]


def what_can_be_measured(gpus: Sequence[Gpu], findings: Sequence[Finding]) -> str:
    """Return a sentence that says what this machine can measure, or what must be repaired first."""
    if repair := [finding.subject for finding in findings if finding.level is Level.BAD]:
        return f"This machine cannot measure until these are repaired: {', '.join(repair)}."
    what = units.counted(len(gpus), "GPU") if gpus else f"{units.counted(core_count(), 'CPU core')} with gloo"
    return f"This machine can measure up to one rank for each of {what}."
