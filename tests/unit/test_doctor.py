"""The doctor's findings, from files as the kernel writes them and a driver with prepared GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from ddpperf.doctor import __main__ as command
from ddpperf.doctor import cpu_and_memory, gpus, software
from ddpperf.doctor.all_checks import Checks, what_can_be_measured
from ddpperf.doctor.cpu_and_memory import judged_load
from ddpperf.doctor.findings import WIDTH, Finding, Level, bad, finding_lines, good, warn
from ddpperf.machine.gpu_description import Gpu
from tests.canned import CannedSuite
from tests.fake_nvml import FakeGpu, healthy, install, refuses

GPUS = [healthy(0).gpu, healthy(1).gpu]
GOOD, WARNING, BAD = Level


def about(subject: str, finding: Finding) -> Finding:
    return replace(finding, subject=subject)


def test_long_finding_keeps_its_columns() -> None:
    lines = finding_lines([about("GPUs", good("none")), about("torch", bad("word " * 40, "repair"))])
    assert lines[0] == "good     GPUs   none"
    assert lines[1].startswith("bad      torch  word")
    assert lines[2].startswith(" " * 16 + "word")
    assert max(map(len, lines)) <= WIDTH


# --- CPU, memory


@pytest.mark.parametrize(
    ("cores", "load", "others", "level", "text"),
    [
        (2, 0.1, {1: 0.05}, GOOD, "other processes use 0.1 of 2 cores"),
        (2, 1.0, {1: 1.0}, WARNING, "other processes use 1.0 of 2 cores, mostly process 1 ("),
        (2, 0.9, {1: 0.1}, WARNING, "other processes use 0.9 of 2 cores"),
        (64, 1.0, {1: 0.2}, GOOD, "other processes use 1.0 of 64 cores"),  # services
        (2, -0.1, {}, GOOD, "other processes use 0.0 of 2 cores"),
    ],
)
def test_load_of_others_is_judged(
    cores: int, load: float, others: dict[int, float], level: Level, text: str
) -> None:
    finding = judged_load(cores, load, others)
    assert finding.level is level
    assert finding.text.startswith(text)


def test_load_of_others_leaves_out_this_process_and_other_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {os.getpid(): 100.0, 7: 50.0}
    found = [
        SimpleNamespace(pid=pid, info={"cpu_percent": percent, "cpu_affinity": [0]})
        for pid, percent in used.items()
    ]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: [100.0, 50.0, 90.0])
    monkeypatch.setattr(psutil, "process_iter", lambda attributes: found)
    assert cpu_and_memory._used_cores() == (2, 0.5, {7: 0.5})


@pytest.mark.parametrize(
    ("quota", "allowed", "level"), [(None, 8, GOOD), (0.5, 8, BAD), (2.0, 8, WARNING), (None, 1, WARNING)]
)
def test_quota_and_cores_are_judged(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, allowed: int, level: Level
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(cpu_and_memory, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpu_and_memory, "core_count", lambda: min(allowed, int(quota or allowed)))
    assert cpu_and_memory.cores(()).level is level


def test_governor_and_memory_of_the_control_group_are_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_and_memory, "CPUS", tmp_path)
    for core, name in enumerate(("powersave", "performance")):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{name}\n")
    finding = cpu_and_memory.governor(())
    assert (finding.level, finding.text) == (WARNING, "powersave on 1 of 2 cores")
    monkeypatch.setattr(cpu_and_memory, "memory_left", lambda: 1_900_000_000)
    assert cpu_and_memory.memory(()).level is WARNING


@pytest.mark.parametrize(
    ("enabled", "used", "level"),
    [
        ("always [madvise] never", [], GOOD),
        ("always madvise [never]", [], WARNING),
        ("always madvise [never]", GPUS, GOOD),  # ranks on GPUs do not ask for huge pages
    ],
)
def test_huge_pages_are_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enabled: str, used: Sequence[Gpu], level: Level
) -> None:
    (tmp_path / "enabled").write_text(enabled)
    monkeypatch.setattr(cpu_and_memory, "HUGE_PAGES", tmp_path / "enabled")
    assert cpu_and_memory.huge_pages(used).level is level


@pytest.mark.parametrize(
    ("free", "used", "level"),
    [(8e9, GPUS, GOOD), (64e6, GPUS, WARNING), (1e6, GPUS, BAD), (1e6, [], WARNING)],
)
def test_shared_memory_is_judged(
    monkeypatch: pytest.MonkeyPatch, free: float, used: Sequence[Gpu], level: Level
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert cpu_and_memory.shared_memory(used).level is level


# --- software


def test_missing_commit_and_compiler_are_warnings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert software.repository(()).level is WARNING
    monkeypatch.setattr(software, "compiler_reason", lambda device: f"no {device}; install both")
    assert software.compiler(()) == warn("no cpu", "install both")


@pytest.mark.parametrize(
    ("name", "value", "spoils"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("NCCL_DEBUG", "warn", False),
        ("OMP_PROC_BIND", "true", True),
        ("OMP_PROC_BIND", "false", False),
        ("ONEDNN_MAX_CPU_ISA", "SSE41", True),
        ("ATEN_CPU_CAPABILITY", "default", True),
    ],
)
def test_variable_that_spoils_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, spoils: bool
) -> None:
    monkeypatch.setenv(name, value)
    finding = software.variables(())
    assert finding.level is (WARNING if spoils else GOOD)
    assert (name in finding.text) == spoils


@pytest.mark.parametrize(
    ("torchvision", "text"),
    [
        ("0.29.1+cu130", "0.29.1+cu130"),
        ("0.28.0", "0.28.0 is made for another torch"),
        ("", "torchvision is not installed"),
    ],
)
def test_torchvision_must_fit_torch(monkeypatch: pytest.MonkeyPatch, torchvision: str, text: str) -> None:
    def version(package: str) -> str:
        if package == "torchvision" and not torchvision:
            raise metadata.PackageNotFoundError(package)
        return torchvision if package == "torchvision" else "2.14.1"

    monkeypatch.setattr(metadata, "version", version)
    finding = software.torchvision(())
    assert finding.text.startswith(text)
    assert (finding.level is GOOD) == (finding.text == torchvision)


def test_last_line_says_what_can_be_measured() -> None:
    little, died = about("memory", warn("little", "buy")), about("two ranks", bad("died", "repair"))
    assert "can measure up to one rank for each of 2 GPUs" in what_can_be_measured(GPUS, [little])
    assert "cannot measure until these are repaired: two" in what_can_be_measured([], [little, died])


# --- GPUs


def found(monkeypatch: pytest.MonkeyPatch, *fakes: FakeGpu) -> dict[str, Finding]:
    install(monkeypatch, fakes)
    checks: Checks = {"GPUs": gpus.present, **gpus.SETTINGS, **gpus.DISTURBANCES}
    return {subject: check([fake.gpu for fake in fakes]) for subject, check in checks.items()}


def not_good(findings: dict[str, Finding]) -> list[str]:
    return [subject for subject, finding in findings.items() if finding.level is not GOOD]


def test_healthy_gpus_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch, healthy(0), healthy(1))
    link = "450 GB/s (nominal, NVLink 4, 18 x 25 GB/s) to the others"
    assert findings["GPUs"].text == f"2 x NVIDIA H200, 150.8 GB each, {link}, driver 580.159.04"
    assert not_good(findings) == []


@pytest.mark.parametrize(
    ("fault", "subject", "text"),
    [
        ({"ComputeRunningProcesses": [SimpleNamespace(pid=2**22 + 1)]}, "GPU load", "used by process"),
        ({"UtilizationRates": SimpleNamespace(gpu=97, memory=3)}, "GPU load", "97% busy"),
        ({"CurrentClocksEventReasons": 0x20}, "GPU clocks", "throttled now (temperature)"),
        ({"EnforcedPowerLimit": 500_000}, "GPU power", "500 W, the default is 700 W"),
        ({"CurrPcieLinkWidth": 8}, "GPU links", "x8 of x16 PCIe lanes are used"),
        (
            {"NvLinkState": lambda link: int(link != 3) if link < 18 else refuses()},
            "GPU links",
            "17 of 18 NVLinks are active",
        ),
    ],
)
def test_fault_is_a_warning_that_names_its_gpu(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], subject: str, text: str
) -> None:
    findings = found(monkeypatch, healthy(0), healthy(1, **fault))
    assert not_good(findings) == [subject]
    assert findings[subject].text.startswith(f"GPU 1: {text}")


def test_silent_driver_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = healthy(0)
    fake.answers.clear()
    assert not_good(found(monkeypatch, fake)) == []


def test_gpu_without_a_driver_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", refuses)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert gpus.present([]).level is GOOD, "the driver's own file is no GPU"
    (tmp_path / "nvidia0").touch()
    assert gpus.present([]).level is BAD


# --- the command, and the line of a run


@pytest.mark.parametrize(
    ("finding", "status"), [(good("much"), 0), (warn("little", "buy"), 0), (bad("none", "buy"), 1)]
)
def test_only_bad_findings_change_the_status(
    monkeypatch: pytest.MonkeyPatch, finding: Finding, status: int
) -> None:
    monkeypatch.setattr(command, "all_findings", lambda *_: [finding])
    assert command.main(["--json"]) == status


def test_run_stores_and_prints_its_findings(canned_suite: CannedSuite) -> None:
    busy = about("CPU load", warn("process 9 (make) uses 1.0 core", "stop it, or wait until it ends"))
    few = about("memory", warn("64 MB available", "end other programs"))
    canned_suite.run_findings = lambda gpus: [busy, few]
    run = canned_suite.run("perf")
    advice = "For advice on 2 problems: python -m ddpperf.doctor"
    assert f"machine     CPU load: process 9 (make) uses 1.0 core. {advice}" in run.lines
    (saved,) = canned_suite.saved_runs()
    assert saved["ddpperf"]["machine_findings"][0] == {
        "subject": "CPU load",
        "level": "warning",
        "text": "process 9 (make) uses 1.0 core",
        "advice": "stop it, or wait until it ends",
    }
