"""The doctor's findings, from files as the kernel writes them and a driver with prepared GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddpperf.doctor import __main__ as command
from ddpperf.doctor import cpu_and_memory, examination, gpus, software
from ddpperf.doctor.cpu_and_memory import CpuTimes, judged_load
from ddpperf.doctor.examination import run_findings, what_can_be_measured
from ddpperf.doctor.findings import WIDTH, Finding, Level, Subject, bad, finding_lines, good, warn
from ddpperf.machine.gpu_description import Gpu
from tests.canned import CannedSuite
from tests.fake_nvml import FakeGpu, healthy, install

GPUS = [healthy(0).gpu, healthy(1).gpu]


def test_long_finding_keeps_its_columns() -> None:
    lines = finding_lines([good(Subject.GPUS, "none"), bad(Subject.TORCH, "word " * 40, "repair")])
    assert lines[0] == "good     GPUs   none"
    assert lines[1].startswith("bad      torch  word")
    assert lines[2].startswith(" " * 16 + "word")
    assert max(map(len, lines)) <= WIDTH


# --- CPU, memory, folders


def times(at: float, busy: float, processes: dict[int, float], **fields: Any) -> CpuTimes:
    fields = {"stolen_seconds": 0.0, "cores": 2} | fields
    return CpuTimes(monotonic_seconds=at, busy_seconds=busy, process_seconds=processes, **fields)


@pytest.mark.parametrize(
    ("now", "level", "text"),
    [
        (times(12, 10.2, {1: 5.1}), Level.GOOD, "other processes use 0.1 of 2 cores"),
        (times(12, 12.0, {1: 7.0}), Level.WARNING, "other processes use 1.0 of 2 cores, mostly 1 ("),
        (times(12, 11.8, {9: 1.8}), Level.WARNING, "other processes use 0.9 of 2 cores, mostly 9 ("),
        (times(12, 10.1, {1: 5.0}, stolen_seconds=0.5), Level.WARNING, "steal time: the hypervisor takes"),
        (times(12, 12.0, {1: 5.4}, cores=64), Level.GOOD, "other processes use 1.0 of 64 cores"),  # services
        (times(12, 9.0, {}), Level.GOOD, "other processes use 0.0 of 2 cores"),  # a counter went back
    ],
)
def test_load_of_others_is_judged(now: CpuTimes, level: Level, text: str) -> None:
    finding = judged_load(times(10, 10.0, {1: 5.0}), now)
    assert finding.level is level
    assert finding.text.startswith(text)


@pytest.mark.parametrize(
    ("quota", "allowed", "level"),
    [
        (None, 8, Level.GOOD),
        (0.5, 8, Level.BAD),
        (2.0, 8, Level.WARNING),
        (None, 1, Level.WARNING),
    ],
)
def test_quota_and_cores_are_judged(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, allowed: int, level: Level
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(cpu_and_memory, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpu_and_memory, "core_count", lambda: min(allowed, int(quota or allowed)))
    assert cpu_and_memory.cores().level is level


@pytest.mark.parametrize(
    ("governors", "level", "text"),
    [
        (["performance", "performance"], Level.GOOD, "performance"),
        (["powersave", "performance"], Level.WARNING, "powersave on 1 of 2 cores"),
    ],
)
def test_governor_is_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, governors: Sequence[str], level: Level, text: str
) -> None:
    monkeypatch.setattr(cpu_and_memory, "CPUS", tmp_path)
    for core, name in enumerate(governors):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{name}\n")
    finding = cpu_and_memory.governor()
    assert (finding.level, finding.text) == (level, text)


def test_memory_of_the_control_group_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_and_memory, "memory_left", lambda: 1_900_000_000)
    assert cpu_and_memory.memory(2).level is Level.WARNING


@pytest.mark.parametrize(
    ("enabled", "device", "level"),
    [
        ("always [madvise] never", "cpu", Level.GOOD),
        ("always madvise [never]", "cpu", Level.WARNING),
        ("always madvise [never]", "cuda", Level.GOOD),  # ranks on GPUs do not ask for huge pages
    ],
)
def test_huge_pages_are_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enabled: str, device: str, level: Level
) -> None:
    (tmp_path / "enabled").write_text(enabled)
    monkeypatch.setattr(cpu_and_memory, "HUGE_PAGES", tmp_path / "enabled")
    assert cpu_and_memory.huge_pages(device).level is level


@pytest.mark.parametrize(
    ("free", "device", "level"),
    [
        (8e9, "cuda", Level.GOOD),
        (64e6, "cuda", Level.WARNING),
        (1e6, "cuda", Level.BAD),
        (1e6, "cpu", Level.WARNING),
    ],
)
def test_shared_memory_is_judged(
    monkeypatch: pytest.MonkeyPatch, free: float, device: str, level: Level
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert cpu_and_memory.shared_memory(2, device).level is level


def test_folder_without_a_commit_is_a_warning(tmp_path: Path) -> None:
    assert cpu_and_memory.repository(tmp_path).level is Level.WARNING


# --- software


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", Level.WARNING),
        ("CUDA_LAUNCH_BLOCKING", "0", Level.GOOD),
        ("NCCL_DEBUG", "INFO", Level.WARNING),
        ("NCCL_DEBUG", "warn", Level.GOOD),
    ],
)
def test_variable_that_spoils_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, level: Level
) -> None:
    monkeypatch.setenv(name, value)
    finding = software.variables_finding()
    assert finding.level is level
    assert (name in finding.text) == (level is Level.WARNING)


def test_library_that_replaces_torchs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/usr/lib:{tmp_path}")
    assert f"{tmp_path}/libnccl.so.2" in software.variables_finding().text


@pytest.mark.parametrize(
    ("torchvision", "text"),
    [("0.29.1+cu130", "0.29.1+cu130"), ("0.28.0", "0.28.0 belongs to another torch"), ("", "not installed")],
)
def test_torchvision_must_fit_torch(monkeypatch: pytest.MonkeyPatch, torchvision: str, text: str) -> None:
    def version(package: str) -> str:
        if package == "torchvision" and not torchvision:
            raise metadata.PackageNotFoundError
        return torchvision if package == "torchvision" else "2.14.1"

    monkeypatch.setattr(metadata, "version", version)
    finding = software.torchvision_finding()
    assert finding.text.startswith(text)
    assert (finding.level is Level.GOOD) == (finding.text == torchvision)


def test_missing_compiler_leaves_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "compiler_problem", lambda *_: "no g++")
    finding = software.compiler_finding("cpu", 10)
    assert (finding.level, finding.text) == (Level.WARNING, "no g++")
    assert "eager steps" in what_can_be_measured([], [finding])


@pytest.mark.parametrize(
    ("described", "findings", "sentence"),
    [
        (GPUS, [], "1 and 2 GPU ranks (NCCL), eager, compiled and captured steps."),
        ([], [bad(Subject.GPUS, "no driver", "repair")], "CPU rank"),
        ([], [bad(Subject.TWO_RANKS, "died", "repair")], "cannot measure until these are repaired: two"),
    ],
)
def test_last_line_says_what_can_be_measured(
    described: list[Gpu], findings: list[Finding], sentence: str
) -> None:
    assert sentence in what_can_be_measured(described, findings)


# --- GPUs


def found(monkeypatch: pytest.MonkeyPatch, *fakes: FakeGpu) -> dict[Subject, Finding]:
    install(monkeypatch, fakes)
    described = [fake.gpu for fake in fakes]
    findings = [
        gpus.present_gpus(described),
        *gpus.gpu_settings(described),
        *gpus.gpu_disturbances(described),
    ]
    return {finding.subject: finding for finding in examination.one_for_each_subject(findings)}


def not_good(findings: dict[Subject, Finding]) -> list[Subject]:
    return [subject for subject, finding in findings.items() if finding.level is not Level.GOOD]


def test_healthy_gpus_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch, healthy(0), healthy(1))
    assert {subject.value: finding.text for subject, finding in findings.items()} == {
        "GPUs": "2 x NVIDIA H200, 150.8 GB each, driver 580.159.04",
        "GPU links": "450 GB/s (nominal, NVLink, 18 x 25 GB/s) to the other GPUs",
        "GPU load": "no other process uses a GPU",
        "GPU clocks": "not held down",
        "GPU power": "limit 700 W",
    }
    assert not_good(findings) == []


@pytest.mark.parametrize(
    ("fault", "subject", "text"),
    [
        ({"ComputeRunningProcesses": [SimpleNamespace(pid=2**22 + 1)]}, Subject.GPU_LOAD, "used by process"),
        ({"UtilizationRates": SimpleNamespace(gpu=97, memory=3)}, Subject.GPU_LOAD, "97% busy"),
        ({"ApplicationsClock": lambda kind: {1: 1200}[kind]}, Subject.CLOCKS, "application clock 1200 of"),
        ({"CurrentClocksEventReasons": 0x20}, Subject.CLOCKS, "throttled now (temperature)"),
        ({"EnforcedPowerLimit": 500_000}, Subject.POWER, "500 W, the default is 700 W"),
        ({"CurrPcieLinkWidth": 8}, Subject.LINKS, "x8 of x16 PCIe lanes are used"),
        ({"NvLinkState": lambda link: int(link != 3)}, Subject.LINKS, "17 of 18 NVLinks are active"),
    ],
)
def test_fault_is_a_warning_that_names_its_gpu(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], subject: Subject, text: str
) -> None:
    findings = found(monkeypatch, healthy(0), healthy(1, **fault))
    assert not_good(findings) == [subject]
    assert findings[subject].text.startswith(f"GPU 1: {text}")


def test_silent_driver_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = healthy(0)
    fake.answers.clear()
    assert not_good(found(monkeypatch, fake)) == []


def test_hidden_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [healthy(0), healthy(1)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.present_gpus([]).text == "none of 2 is visible, because CUDA_VISIBLE_DEVICES=''"
    assert "1 of 2 are visible" in gpus.present_gpus(GPUS[:1]).text


def test_gpu_without_a_driver_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert gpus.present_gpus([]).level is Level.GOOD, "the driver's own file is no GPU"
    (tmp_path / "nvidia0").touch()
    assert gpus.present_gpus([]).level is Level.BAD


def test_run_leaves_out_what_it_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run watches throttling and other processes in each round, so they would be found twice."""
    busy = SimpleNamespace(gpu=99, memory=9)
    fake = healthy(0, CurrentClocksEventReasons=0x20, UtilizationRates=busy, EnforcedPowerLimit=500_000)
    install(monkeypatch, [fake])
    subjects = {finding.subject for finding in run_findings("cuda", [fake.gpu])}
    assert Subject.POWER in subjects
    assert not subjects & {Subject.CLOCKS, Subject.GPU_LOAD}
    assert Subject.POWER not in {finding.subject for finding in run_findings("cpu", [fake.gpu])}


# --- the command, and the line of a run


@pytest.mark.parametrize("options", [["--seconds", "4"], ["--seconds", "nan"], ["--unknown"]])
def test_wrong_option_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(options)
    assert ended.value.code == 4


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (good(Subject.MEMORY, "much"), 0),
        (warn(Subject.MEMORY, "little", "buy"), 0),
        (bad(Subject.MEMORY, "none", "buy"), 1),
    ],
)
def test_only_bad_findings_change_the_status(
    monkeypatch: pytest.MonkeyPatch, finding: Finding, status: int
) -> None:
    monkeypatch.setattr(command, "all_findings", lambda *_: [finding])
    assert command.main(["--json"]) == status


def test_run_stores_and_prints_its_findings(canned_suite: CannedSuite) -> None:
    busy = warn(Subject.CPU_LOAD, "process 9 (make) uses 1.0 core", "stop it, or wait until it ends")
    few = warn(Subject.MEMORY, "64 MB available", "end other programs")
    canned_suite.run_findings = lambda device, gpus: [busy, few]
    run = canned_suite.run("perf")
    line = "machine     CPU load: process 9 (make) uses 1.0 core. 2 findings: python -m ddpperf.doctor"
    assert line in run.lines
    (saved,) = canned_suite.saved_runs()
    assert saved["ddpperf"]["machine_findings"][0] == {
        "subject": "CPU load",
        "level": "warning",
        "text": "process 9 (make) uses 1.0 core",
        "advice": "stop it, or wait until it ends",
    }
