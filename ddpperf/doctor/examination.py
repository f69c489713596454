"""All checks of the doctor, and the fast ones that each test run makes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ddpperf.doctor import cpu_and_memory
from ddpperf.doctor import gpus as gpu_checks
from ddpperf.doctor.findings import Finding, Level, Subject, warn
from ddpperf.doctor.software import compiler_finding, torchvision_finding, variables_finding
from ddpperf.doctor.two_ranks import rank_findings
from ddpperf.errors import Refused
from ddpperf.machine.device_lock import lock_devices
from ddpperf.machine.gpu_description import Gpu
from ddpperf.machine.hardware import core_count

WATCH_SECONDS, RUN_WATCH_SECONDS = 0.5, 0.2  # of the CPU's load
END_SECONDS = 1.5  # to start Python, to kill a child that hangs, and to print
RANKS = 2  # of a run on a CPU


def all_findings(gpus: Sequence[Gpu], seconds: float) -> list[Finding]:
    """Make all checks in at most `seconds`, and return one finding for each subject.

    The CPU's load is watched first, because the checks in child processes use the CPU, too.
    """
    end = time.monotonic() + seconds - END_SECONDS
    device = "cuda" if gpus else "cpu"
    found = [
        gpu_checks.present_gpus(gpus),
        *gpu_checks.gpu_disturbances(gpus),
        *_quick(device, gpus, WATCH_SECONDS),
        cpu_and_memory.repository(Path.cwd()),
        torchvision_finding(),
    ]
    try:
        with lock_devices([gpu.uuid for gpu in gpus] or ["cpu"]):
            found += _in_children(device, gpus, end)
    except Refused as refused:
        found.append(warn(Subject.TWO_RANKS, "not tried", str(refused)))
    return one_for_each_subject(found)


def run_findings(device: str, gpus: Sequence[Gpu]) -> list[Finding]:
    """Run the checks that take less than 0.5 s, and return the problems, the worst first.

    A test run watches throttling and other processes on its GPUs itself.
    """
    measured = gpus if device == "cuda" else ()
    problems = [finding for finding in _quick(device, measured, RUN_WATCH_SECONDS) if finding.badness]
    return sorted(problems, key=lambda finding: finding.badness, reverse=True)


def _quick(device: str, gpus: Sequence[Gpu], watch_seconds: float) -> list[Finding]:
    """Run the checks that start no process, the most important subject first."""
    ranks = max(len(gpus), RANKS)
    return [
        cpu_and_memory.cpu_load(watch_seconds),
        cpu_and_memory.cores(),
        cpu_and_memory.memory(ranks),
        cpu_and_memory.shared_memory(ranks, device),
        variables_finding(),
        *gpu_checks.gpu_settings(gpus),
        cpu_and_memory.governor(),
        cpu_and_memory.huge_pages(device),
    ]


def _in_children(device: str, gpus: Sequence[Gpu], end: float) -> list[Finding]:
    """Run the two-rank check and the compiler check at the same time, in child processes.

    end: the time.monotonic() value at which they must be done.
    """
    left = max(1.0, end - time.monotonic())
    with ThreadPoolExecutor() as pool:
        ranks = pool.submit(rank_findings, gpus, left)
        compiler = pool.submit(compiler_finding, device, left / 2)  # it tries up to two compilers
        return [compiler.result(), *ranks.result()]


def one_for_each_subject(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings in the order of their subjects, and of each subject only the worst."""
    worst = {finding.subject: finding for finding in sorted(found, key=lambda finding: finding.badness)}
    return [worst[subject] for subject in Subject if subject in worst]


def what_can_be_measured(gpus: Sequence[Gpu], findings: Sequence[Finding]) -> str:
    """Return a sentence that says what this machine can measure, or what must be repaired first."""
    repair = [finding.subject for finding in findings if finding.level is Level.BAD]
    if needed := [subject for subject in repair if subject is not Subject.GPUS]:
        return f"This machine cannot measure until these are repaired: {', '.join(needed)}."
    count = len(gpus) or core_count()
    ranks = {1: "1", 2: "1 and 2"}.get(count, f"1 to {count}")
    backend = "" if count == 1 else " (NCCL)" if gpus else " (gloo)"
    compiles = not any(finding.subject is Subject.COMPILER and finding.badness for finding in findings)
    steps = ["eager", *["compiled"] * compiles, *["captured"] * bool(gpus)]
    able = f"{', '.join(steps[:-1])}{' and ' * (len(steps) > 1)}{steps[-1]} steps"
    what = f"{ranks} {'GPU' if gpus else 'CPU'} rank{'s' * (count > 1)}{backend}, {able}"
    return f"This machine can measure: {what}."
