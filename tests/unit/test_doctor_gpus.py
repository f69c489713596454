"""What the doctor says about prepared GPUs; no GPU is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddpperf.doctor import gpus, software
from ddpperf.doctor.checks import run_findings
from ddpperf.doctor.child import Report
from ddpperf.doctor.findings import Finding, Level, Subject
from ddpperf.machine.links import nvlink
from tests.fake_nvml import FakeGpu, healthy, install


def found(monkeypatch: pytest.MonkeyPatch, *fakes: FakeGpu) -> dict[Subject, Finding]:
    install(monkeypatch, fakes)
    described = [fake.gpu for fake in fakes]
    checks = gpus.present_gpus, gpus.gpu_settings, gpus.gpu_disturbances
    return {finding.subject: finding for check in checks for finding in check(described)}


def not_good(findings: dict[Subject, Finding]) -> list[tuple[Subject, str]]:
    return [
        (finding.subject, finding.text) for finding in findings.values() if finding.level is not Level.GOOD
    ]


def test_healthy_gpus_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch, healthy(0), healthy(1))
    assert not_good(findings) == []
    assert {subject.value: finding.text for subject, finding in findings.items()} == {
        "GPUs": "2 x NVIDIA H200, 150.8 GB each",
        "driver": "580.159.04, for CUDA up to 13.0",
        "NVLink": "18 links, 450 GB/s in one direction each",
        "PCIe": "5.0 x16, 63 GB/s in one direction each",
        "GPU memory": "each GPU can read the memory of all others",
        "GPU clocks": "application clocks are the default",
        "power limit": "700 W each",
        "persistence": "on",
        "GPU errors": "no uncorrected memory errors since the driver started",
        "MIG": "off",
        "GPU load": "no other process uses a GPU",
        "throttling": "none now",
    }


@pytest.mark.parametrize(
    ("fault", "subject", "text"),
    [
        (
            {"ComputeRunningProcesses": [SimpleNamespace(pid=2**22 + 1)]},
            Subject.GPU_PROCESSES,
            "used by process 4194305",
        ),
        ({"UtilizationRates": SimpleNamespace(gpu=97, memory=3)}, Subject.GPU_PROCESSES, "97% busy"),
        (
            {"ApplicationsClock": lambda kind: {1: 1200}[kind]},
            Subject.CLOCKS,
            "application clock 1200 of 1980 MHz",
        ),
        ({"CurrentClocksEventReasons": 0x20}, Subject.THROTTLING, "temperature"),
        ({"EnforcedPowerLimit": 500_000}, Subject.POWER, "500 W, the default is 700 W"),
        ({"PersistenceMode": 0}, Subject.PERSISTENCE, "off, so"),
        (
            {"TotalEccErrors": lambda kind, since: {(1, 0): 2}[kind, since]},
            Subject.ECC,
            "2 uncorrected memory errors",
        ),
        ({"MigMode": [1, 1]}, Subject.MIG, "the GPU is divided"),
        ({"CurrPcieLinkWidth": 8}, Subject.PCIE, "x8 of x16 lanes are used"),
        ({"NvLinkState": lambda link: int(link != 3)}, Subject.NVLINK, "17 of 18 NVLinks are active"),
    ],
)
def test_fault_is_a_warning_that_names_its_gpu(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], subject: Subject, text: str
) -> None:
    findings = found(monkeypatch, healthy(0), healthy(1, **fault))
    assert [each for each, _ in not_good(findings)] == [subject]
    assert findings[subject].level is Level.WARNING
    assert findings[subject].text.startswith(f"GPU 1: {text}")


def test_equal_faults_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [healthy(0, PersistenceMode=0), healthy(1), healthy(2, PersistenceMode=0)]
    text = found(monkeypatch, *fakes)[Subject.PERSISTENCE].text
    assert text.startswith("GPUs 0, 2: off")


def test_visible_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = healthy(0, ComputeRunningProcesses=[SimpleNamespace(pid=os.getpid())])
    command = Path("/proc/self/comm").read_text().strip()
    assert f"{os.getpid()} ({command})" in found(monkeypatch, fake)[Subject.GPU_PROCESSES].text


def test_silent_driver_gives_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = healthy(0)
    fake.answers.clear()
    findings = found(monkeypatch, fake)
    assert not_good(findings) == []
    assert findings[Subject.PCIE].text == "not known"


def test_lower_pcie_generation_at_idle_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(monkeypatch, healthy(0, CurrPcieLinkGeneration=1))[Subject.PCIE]
    assert finding.level is Level.GOOD
    assert finding.text == "5.0 x16, 63 GB/s in one direction (now 1.0, to save power)"


@pytest.mark.parametrize(
    ("name", "links", "rate"),
    [
        ("NVIDIA H200", 18, "450 GB/s"),
        ("NVIDIA H100 80GB HBM3", 18, "450 GB/s"),
        ("NVIDIA A100-SXM4-80GB", 12, "300 GB/s"),
        ("Tesla V100-SXM2-32GB", 6, "150 GB/s"),
        ("NVIDIA B200", 18, "900 GB/s"),
        ("NVIDIA Unknown", 4, "not known"),
    ],
)
def test_nominal_rate_follows_the_model(
    monkeypatch: pytest.MonkeyPatch, name: str, links: int, rate: str
) -> None:
    """The driver of these GPUs reports the number of links only."""
    _, each = nvlink(name, None)
    fake = healthy(0)
    fake.gpu = replace(
        fake.gpu, name=name, nvlinks=links, nvlink_bytes_per_second=links * each if each else None
    )
    assert rate in found(monkeypatch, fake)[Subject.NVLINK].text


def test_hidden_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [healthy(0), healthy(1)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = gpus.present_gpus([])
    assert finding.text == "none of 2 is visible, because CUDA_VISIBLE_DEVICES=''"
    assert "1 of 2 are visible" in gpus.present_gpus([healthy(0).gpu])[0].text


def test_gpu_without_a_driver_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    (finding,) = gpus.present_gpus([])
    assert finding.level is Level.GOOD, "the driver's own file is no GPU"
    (tmp_path / "nvidia0").touch()
    (finding,) = gpus.present_gpus([])
    assert finding.level is Level.BAD
    assert "mismatch" in finding.text.lower()


@pytest.mark.parametrize(
    ("clocks", "level"), [({0: (1980, 1980)}, Level.GOOD), ({1: (1200, 1980)}, Level.WARNING)]
)
def test_clock_locked_low_is_found_under_load(clocks: Mapping[int, tuple[int, int]], level: Level) -> None:
    (finding,) = gpus.loaded_clocks(clocks)
    assert finding.level is level
    assert level is Level.GOOD or "GPU 1: 1200 of 1980 MHz" in finding.text


def test_gpu_without_a_clock_shifts_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = healthy(0)
    silent.answers.clear()
    fakes = [silent, healthy(1, ClockInfo=1200, MaxClockInfo=1980)]
    install(monkeypatch, fakes)
    monkeypatch.setattr(software, "visible_gpus", lambda: [fake.gpu for fake in fakes])
    monkeypatch.setattr(software, "LOAD_SECONDS", 0.0)
    *_, clocks = software.judged(Report(facts=software._tried_gpus()), [], "")
    assert clocks.text == "GPU 1: 1200 of 1980 MHz under a light load"


def test_run_leaves_out_what_it_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run watches throttling and other processes in each round, so they would be found twice."""
    busy = SimpleNamespace(gpu=99, memory=9)
    fake = healthy(0, CurrentClocksEventReasons=0x20, UtilizationRates=busy, EnforcedPowerLimit=500_000)
    install(monkeypatch, [fake])
    subjects = {finding.subject for finding in run_findings("cuda", [fake.gpu])}
    assert Subject.POWER in subjects
    assert not subjects & {Subject.THROTTLING, Subject.GPU_PROCESSES}
    assert Subject.POWER not in {finding.subject for finding in run_findings("cpu", [fake.gpu])}
