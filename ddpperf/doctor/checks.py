"""All checks of the doctor, and the fast ones that each test run makes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from ddpperf.doctor import gpus as gpu_checks
from ddpperf.doctor import system
from ddpperf.doctor.findings import Finding, Level, Subject, warn
from ddpperf.doctor.smoke import smoke_finding
from ddpperf.doctor.software import compiler_finding, software_findings
from ddpperf.errors import Refused
from ddpperf.machine.device_lock import lock_devices
from ddpperf.machine.hardware import Gpu, core_count

WATCH_SECONDS, RUN_WATCH_SECONDS = 0.5, 0.2  # of the CPU's load
END_SECONDS = 1.5  # to start Python, to kill a child that hangs, and to print
RANKS = 2  # of a run on a CPU

Findings = Mapping[Subject, Finding]


def all_findings(gpus: Sequence[Gpu], seconds: float) -> Findings:
    """Make all checks in at most `seconds`, and return one finding for each subject.

    The CPU's load is watched first, because the checks in child processes use the CPU, too.
    """
    end = time.monotonic() + seconds - END_SECONDS
    device = "cuda" if gpus else "cpu"
    found = [
        *gpu_checks.present_gpus(gpus),
        *gpu_checks.gpu_disturbances(gpus),
        *_quick(device, gpus, WATCH_SECONDS),
        system.turbo(),
        system.bf16(),
        system.loopback(),
    ]
    with ExitStack() as locks:
        try:
            locks.enter_context(lock_devices([gpu.uuid for gpu in gpus] or ["cpu"], is_brief=True))
        except Refused as refused:
            found.append(warn(Subject.SMOKE, "not tried", str(refused)))
        else:
            found += _in_children(device, gpus, end)
    return one_for_each_subject(found)


def run_findings(device: str, gpus: Sequence[Gpu]) -> list[Finding]:
    """Make the checks that take less than 0.5 s, and return what is not good, the worst first.

    A test run watches throttling and other processes on its GPUs itself.
    """
    measured = gpus if device == "cuda" else ()
    found = _quick(device, measured, RUN_WATCH_SECONDS)
    problems = [finding for finding in found if finding.level is not Level.GOOD]
    return sorted(problems, key=_badness, reverse=True)


def _badness(finding: Finding) -> int:
    return list(Level).index(finding.level)


def _quick(device: str, gpus: Sequence[Gpu], watch_seconds: float) -> list[Finding]:
    """Return the findings that start no process, the most important subject first."""
    ranks = max(len(gpus), RANKS)
    return [
        system.cpu_load(watch_seconds),
        system.cores(),
        system.memory(ranks),
        system.shared_memory(ranks, device),
        system.open_files(),
        *system.folders(),
        *gpu_checks.gpu_settings(gpus),
        system.governor(),
        system.huge_pages(device),
    ]


def _in_children(device: str, gpus: Sequence[Gpu], end: float) -> list[Finding]:
    """Make the checks that start processes, side by side, until a moment of time.monotonic()."""
    left = max(1.0, end - time.monotonic())
    with ThreadPoolExecutor() as pool:
        software = pool.submit(software_findings, gpus, left)
        smoke = pool.submit(smoke_finding, "cuda" if len(gpus) > 1 else "cpu", left)
        compiler = pool.submit(compiler_finding, device, left / 2)  # it tries up to two compilers
        return [compiler.result(), *software.result(), smoke.result()]


def one_for_each_subject(found: Sequence[Finding]) -> Findings:
    """Return the findings in the order of their subjects, and of each subject only the worst."""
    worst = {finding.subject: finding for finding in sorted(found, key=_badness)}
    return {subject: worst[subject] for subject in Subject if subject in worst}


def what_can_be_measured(gpus: Sequence[Gpu], findings: Findings) -> str:
    """Return a sentence that says what this machine can measure, and what it cannot."""
    bad = [subject for subject, finding in findings.items() if finding.level is Level.BAD]
    if needed := [subject for subject in bad if subject is not Subject.GPUS]:
        return f"This machine cannot measure until these are repaired: {', '.join(needed)}."
    count = len(gpus) or core_count()
    ranks = {1: "1", 2: "1 and 2"}.get(count, f"1 to {count}")
    where = "GPU" if gpus else "CPU"
    backend = "" if count == 1 else " (NCCL)" if gpus else " (gloo)"
    unable = {
        subject
        for subject, finding in findings.items()
        if finding.level is not Level.GOOD and not finding.late  # what was late may work
    }
    compiles = Subject.COMPILER not in unable
    steps = ["eager", *["compiled"] * compiles, *["captured"] * bool(gpus)]
    cannot = [
        *["compiled steps (no compiler)"] * (not compiles),
        *["CUDA graphs and NCCL (no GPU)"] * (not gpus),
        *["NCCL (one GPU)"] * (len(gpus) == 1),
    ]
    if Subject.TORCHVISION in unable:
        cannot.append("torchvision's models and loader inputs")
    able = f"{', '.join(steps[:-1])}{' and ' * (len(steps) > 1)}{steps[-1]} steps"
    left_out = f"; not: {', '.join(cannot)}" if cannot else ""
    late = [subject for subject, finding in findings.items() if finding.late]
    unchecked = f" Not checked in time: {', '.join(late)}." if late else ""
    what = f"{ranks} {where} rank{'s' * (count > 1)}{backend}, {able}{left_out}"
    return f"This machine can measure: {what}.{unchecked}"
