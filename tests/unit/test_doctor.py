"""The doctor's findings, from files as the kernel writes them and reports of child processes."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpperf.doctor import __main__ as command
from ddpperf.doctor import checks, smoke, software, system
from ddpperf.doctor.checks import one_for_each_subject, run_findings, what_can_be_measured
from ddpperf.doctor.child import Report
from ddpperf.doctor.findings import (
    WIDTH,
    Finding,
    Level,
    Subject,
    bad,
    counted_levels,
    finding_lines,
    good,
    late,
    warn,
)
from ddpperf.doctor.system import CpuTimes, judged_load
from ddpperf.report.summary import summary_lines
from tests.canned import CannedSuite
from tests.fake_nvml import healthy

H200 = healthy().gpu


# --- findings


def test_advice_belongs_to_what_is_not_good() -> None:
    with pytest.raises(ValueError, match="memory is bad, with the advice ''"):
        Finding(subject=Subject.MEMORY, level=Level.BAD, text="none")
    with pytest.raises(ValueError, match="memory is good, with the advice 'buy'"):
        Finding(subject=Subject.MEMORY, level=Level.GOOD, text="much", advice="buy")


def test_each_finding_is_one_aligned_line() -> None:
    found = [good(Subject.GPUS, "none"), warn(Subject.SHARED_MEMORY, "1 MB free", "mount more")]
    assert finding_lines(found) == [
        "good     GPUs      none",
        "warning  /dev/shm  1 MB free; mount more",
    ]


def test_long_finding_keeps_its_columns() -> None:
    first, second, *_ = finding_lines([bad(Subject.TORCH, "word " * 40, "repair")])
    assert len(first) <= WIDTH
    assert first.startswith("bad      torch  word")
    assert second.startswith(" " * 16 + "word")


def test_levels_are_counted() -> None:
    warning, wrong = warn(Subject.HOME, "a", "b"), bad(Subject.TORCH, "a", "b")
    assert counted_levels([good(Subject.MIG, "off")]) == "Found no warning."
    assert counted_levels([warning]) == "Found 1 warning."
    assert counted_levels([warning, warning, wrong]) == "Found 2 warnings and 1 bad."


def test_worst_finding_of_a_subject_stays() -> None:
    fine, low, last = good(Subject.CLOCKS, "1"), warn(Subject.CLOCKS, "2", "x"), good(Subject.CLOCKS, "3")
    assert one_for_each_subject([fine, low, last]) == {Subject.CLOCKS: low}
    assert one_for_each_subject([fine, last]) == {Subject.CLOCKS: last}
    both = one_for_each_subject([good(Subject.SMOKE, ""), good(Subject.GPUS, "")])
    assert list(both) == [Subject.GPUS, Subject.SMOKE]


# --- CPU


def times(
    at: float, busy: float, processes: dict[int, float], stolen: float = 0.0, cores: int = 2
) -> CpuTimes:
    return CpuTimes(
        monotonic_seconds=at, cores=cores, busy_seconds=busy, stolen_seconds=stolen, process_seconds=processes
    )


@pytest.mark.parametrize(
    ("now", "level", "text"),
    [
        (times(12, 10.2, {1: 5.1}), Level.GOOD, "other processes use 0.1 of 2 cores"),
        (times(12, 12.0, {1: 7.0}), Level.WARNING, "other processes use 1.0 of 2 cores, mostly 1 (make)"),
        (times(12, 11.0, {1: 5.1}), Level.WARNING, "other processes use 0.5 of 2 cores"),  # not visible here
        (times(12, 11.8, {9: 1.8}), Level.WARNING, "other processes use 0.9 of 2 cores, mostly 9 (make)"),
        (
            times(12, 10.1, {1: 5.0}, stolen=0.5),
            Level.WARNING,
            "steal time: the hypervisor takes 0.2 of 2 cores",
        ),
        (
            times(12, 14.0, {1: 7.0, 2: 0.8, 3: 0.6}),
            Level.WARNING,
            "other processes use 2.0 of 2 cores, mostly 1 (make)",
        ),
        (times(12, 12.0, {1: 5.4}, cores=64), Level.GOOD, "other processes use 1.0 of 64 cores"),  # services
        (times(12, 12.0, {1: 7.0}, cores=64), Level.WARNING, "other processes use 1.0 of 64 cores, mostly 1"),
        (times(12, 9.0, {}), Level.GOOD, "other processes use 0.0 of 2 cores"),  # a counter went back
    ],
)
def test_load_of_others_is_judged(
    monkeypatch: pytest.MonkeyPatch, now: CpuTimes, level: Level, text: str
) -> None:
    monkeypatch.setattr(system, "_command", lambda pid: "make")
    monkeypatch.setattr(system, "_may_meet", lambda pid: True)
    finding = judged_load(times(10, 10.0, {1: 5.0}), now)
    assert finding.level is level
    assert finding.text.startswith(text)


def test_process_on_other_cores_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {pid})  # each process has its own core
    assert judged_load(times(0, 0, {}), times(1, 0, {7: 1.0})).level is Level.GOOD


def test_own_work_is_no_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor and the test run read files, and must not find themselves."""
    monkeypatch.setattr(system, "PROC", tmp_path)
    core = min(os.sched_getaffinity(0))
    stat = f"cpu  9 9 9 9 9 9 9 9 9 9\ncpu{core} 1000 200 300 8 8 40 50 700 6 6\ncpu9999 9 9 9 9 9 9 9 9 9 9"
    process = "(a) b) S 1 1 1 0 -1 0 0 0 0 0 150 50 7 7 20 0 1"
    files = {"stat": stat, "4711/stat": f"4711 {process}", f"{os.getpid()}/stat": f"{os.getpid()} {process}"}
    written(tmp_path, files | {"12/status": "ended"})
    before = system.cpu_times()
    assert before.cores == 1
    assert before.stolen_seconds == 7
    assert before.process_seconds == {4711: 2.0}
    assert before.busy_seconds == pytest.approx(15.9 - sum(os.times()[:2]), abs=0.1)
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert system.cpu_times().busy_seconds <= before.busy_seconds - 0.15


def test_times_of_other_cores_tell_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file may list none of the cores that this process may use."""
    monkeypatch.setattr(system, "PROC", written(tmp_path, {"stat": "cpu9999 9 9 9 9 9 9 9 9 9 9"}))
    assert system.cpu_load(0) == good(Subject.LOAD, "not known")


@pytest.mark.parametrize(
    ("quota", "allowed", "level"),
    [
        (None, 8, Level.GOOD),
        (0.5, 8, Level.BAD),
        (2.0, 8, Level.WARNING),
        (8.0, 8, Level.GOOD),
        (None, 1, Level.WARNING),
    ],
)
def test_quota_and_cores_are_judged(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, allowed: int, level: Level
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(system, "cpu_quota", lambda: quota)
    monkeypatch.setattr(system, "core_count", lambda: min(allowed, int(quota or allowed)))
    assert system.cores().level is level


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("governors", "level", "text"),
    [
        ([], Level.GOOD, "not known, as in most virtual machines"),
        (["performance", "performance"], Level.GOOD, "performance"),
        (["powersave", "performance"], Level.WARNING, "powersave on 1 of 2 cores"),
    ],
)
def test_governor_is_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, governors: Sequence[str], level: Level, text: str
) -> None:
    monkeypatch.setattr(system, "CPUS", tmp_path)
    written(tmp_path, {f"cpu{core}/cpufreq/scaling_governor": each for core, each in enumerate(governors)})
    finding = system.governor()
    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "not known"),
        ({"intel_pstate/no_turbo": "1"}, "off"),
        ({"intel_pstate/no_turbo": "0"}, "on: "),
        ({"cpufreq/boost": "0"}, "off"),
        ({"cpufreq/boost": "1"}, "on: "),
    ],
)
def test_turbo_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], text: str
) -> None:
    monkeypatch.setattr(system, "CPUS", written(tmp_path, files))
    assert system.turbo().text.startswith(text)


# --- memory, limits, folders


@pytest.mark.parametrize(
    ("group", "level"), [(None, Level.GOOD), (1_900_000_000, Level.WARNING), (2_100_000_000, Level.GOOD)]
)
def test_memory_of_the_machine_and_its_group_is_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: int | None, level: Level
) -> None:
    monkeypatch.setattr(system, "memory_left", lambda: group)
    meminfo = {"meminfo": "MemTotal: 9000000 kB\nMemAvailable: 3000000 kB"}
    monkeypatch.setattr(system, "PROC", written(tmp_path, meminfo))
    assert system.memory(2).level is level
    assert system.memory(4).level is Level.WARNING


def test_unknown_memory_is_no_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "memory_left", lambda: None)
    monkeypatch.setattr(system, "PROC", tmp_path)
    assert system.memory(2) == good(Subject.MEMORY, "not known")


def test_limit_of_addresses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of ulimit -v, which lets torch fail while much memory is free."""
    limits = {resource.RLIMIT_AS: (3_000_000_000, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    finding = system.memory(2)
    assert finding.level is Level.WARNING
    assert finding.text.startswith("a process may reserve 3 GB at most")


@pytest.mark.parametrize(
    ("enabled", "device", "level"),
    [
        ("always [madvise] never", "cpu", Level.GOOD),
        ("[always] madvise never", "cpu", Level.GOOD),
        ("always madvise [never]", "cpu", Level.WARNING),
        ("always madvise [never]", "cuda", Level.GOOD),  # ranks on GPUs do not ask for huge pages
        ("", "cpu", Level.GOOD),
    ],
)
def test_huge_pages_are_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enabled: str, device: str, level: Level
) -> None:
    monkeypatch.setattr(system, "HUGE_PAGES", written(tmp_path, {"enabled": enabled}) / "enabled")
    assert system.huge_pages(device).level is level


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
    class Usage:
        pass

    usage: Any = Usage()
    usage.free = free
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert system.shared_memory(2, device).level is level


def test_missing_shared_memory_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "SHARED_MEMORY", tmp_path / "shm")
    finding = system.shared_memory(2, "cpu")
    assert finding.level is Level.BAD
    assert "No such file" in finding.text


@pytest.mark.parametrize(
    ("limits", "level", "advice"),
    [
        ((23, 4096), Level.BAD, "ulimit -n 1024"),
        ((24, 4096), Level.WARNING, "ulimit -n 1024"),
        ((64, 64), Level.WARNING, "raise the hard limit"),
        ((1024, 1024), Level.GOOD, ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Level.GOOD, ""),
    ],
)
def test_limit_of_open_files_is_judged(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], level: Level, advice: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    finding = system.open_files()
    assert finding.level is level
    assert finding.advice.startswith(advice)


def test_home_that_cannot_be_written_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for home in ("/proc", str(tmp_path / "missing")):  # in /proc even root creates no file
        monkeypatch.setenv("HOME", home)
        found = {finding.subject: finding for finding in system.folders()}
        assert found[Subject.HOME].level is Level.WARNING
        assert found[Subject.HOME].text.startswith(f"{home} is not writable (")
        assert found[Subject.PROJECT].level is Level.GOOD
    assert list(tmp_path.iterdir()) == [], "the check leaves no file"


def test_removed_folder_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    found = {finding.subject: finding for finding in system.folders()}
    assert found[Subject.PROJECT].level is Level.BAD
    assert found[Subject.PROJECT].text.startswith("it was removed")


def test_machine_without_a_temporary_folder_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert {finding.subject: finding.level for finding in system.folders()}[Subject.TEMPORARY] is Level.BAD


# --- software

FINE = {"torch": "2.14.1+cu130", "cuda": "13.0", "nccl": "2.30.7", "torchvision": "0.29.1+cu130"}


def software_of(
    facts: dict[str, Any], problem: str = "", gpus: int = 0, path: str = ""
) -> dict[Subject, Finding]:
    found = software.judged(Report(facts=facts, problem=problem), [H200] * gpus, path)
    return {finding.subject: finding for finding in found}


def test_fitting_versions_are_good() -> None:
    found = software_of(FINE)
    assert {finding.level for finding in found.values()} == {Level.GOOD}
    assert found[Subject.TORCHVISION].text == "0.29.1+cu130, which fits this torch"


@pytest.mark.parametrize(
    ("facts", "gpus", "text"),
    [
        ({"torch": "2.10.0", "torchvision": "0.25.0"}, 0, "2.10.0, ddpperf needs 2.11 or newer"),
        ({"cuda": None}, 2, "cannot use GPUs, and there are 2"),
        (
            {"cuda_error": "The NVIDIA driver on your system is too old"},
            1,
            "driver on your system is too old",
        ),
        ({}, 1, "cannot use the GPUs (was killed by SIGSEGV)"),
    ],
)
def test_torch_that_cannot_measure_is_bad(facts: dict[str, Any], gpus: int, text: str) -> None:
    found = software_of(FINE | facts, "was killed by SIGSEGV", gpus)
    assert found[Subject.TORCH].level is Level.BAD
    assert text in found[Subject.TORCH].text


def test_clocks_under_load_need_no_other_proof() -> None:
    found = software_of(FINE | {"clocks": [[0, 1980, 1980]]}, gpus=1)
    assert found[Subject.TORCH].level is Level.GOOD
    assert found[Subject.CLOCKS].text == "1980 MHz under a light load"


def test_gpus_need_nccl() -> None:
    assert software_of(FINE | {"nccl": "", "clocks": []}, gpus=1)[Subject.NCCL].level is Level.BAD
    assert software_of(FINE | {"nccl": ""})[Subject.NCCL].level is Level.GOOD


@pytest.mark.parametrize(
    ("torchvision", "text"),
    [
        ({"torchvision": ""}, "not installed, so its models and loaders cannot run"),
        (
            {"torchvision": "0.28.0"},
            "0.28.0 belongs to another torch, torch 2.14.1+cu130 to torchvision 0.29",
        ),
        (
            {"torchvision": None, "torchvision_error": "operator torchvision::nms does not exist"},
            "nms does not exist",
        ),
        ({"torchvision": None}, "its import was killed by SIGSEGV"),
    ],
)
def test_torchvision_that_does_not_fit_is_a_warning(torchvision: dict[str, Any], text: str) -> None:
    finding = software_of(FINE | torchvision, "was killed by SIGSEGV")[Subject.TORCHVISION]
    assert finding.level is Level.WARNING
    assert text in finding.text
    assert finding.advice == "pip install torchvision==0.29.*"


@pytest.mark.parametrize(
    ("known", "gpus", "subject", "text"),
    [
        ((), 0, Subject.TORCH, "its import did not end within 8 s"),
        (("torch", "cuda", "nccl"), 0, Subject.TORCHVISION, "its import did not end within 8 s"),
        (("torch", "cuda", "nccl"), 1, Subject.TORCH, "its use of the GPUs did not end within 8 s"),
    ],
)
def test_late_import_is_not_an_installation_to_repair(
    known: Sequence[str], gpus: int, subject: Subject, text: str
) -> None:
    report = Report(facts={name: FINE[name] for name in known}, problem="did not end within 8 s", late=True)
    found = {finding.subject: finding for finding in software.judged(report, [H200] * gpus, "")}
    assert found[subject] == late(subject, text)
    assert Level.BAD not in {finding.level for finding in found.values()}


def test_slow_compiler_is_late_and_not_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    finding = software.compiler_finding("cpu", seconds=0.2)
    assert finding == late(Subject.COMPILER, "it did not compile a short file within 0.2 s")


def test_torchvision_follows_torch() -> None:
    released = {"2.0.1": "0.15", "2.11.0+cu130": "0.26", "2.14.1": "0.29", "3.0.0": ""}
    assert {torch: software.matching_torchvision(torch) for torch in released} == released


def test_missing_folder_of_libraries_is_a_warning(tmp_path: Path) -> None:
    finding = software_of(FINE, path=f"{tmp_path}:{tmp_path}/gone")[Subject.LIBRARIES]
    assert finding.level is Level.WARNING
    assert finding.text == f"LD_LIBRARY_PATH names {tmp_path}/gone, which is not a folder"
    usual = "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"  # of containers' images
    assert software_of(FINE, path=usual)[Subject.LIBRARIES].level is Level.GOOD


def test_only_torchs_libraries_elsewhere_are_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/x::/env/nvidia/lib:/usr/lib/here")
    loaded = ["/opt/x/libnccl.so.2", "/opt/x/libcudnn_ops.so.9", "/opt/x/libcuda.so.1", "/opt/y/libnccl.so.2"]
    loaded += ["/env/nvidia/lib/libcudart.so.13", "/usr/lib/here/libstdc++.so.6", "/opt/x/libfoo.so"]
    maps = (
        "".join(f"7f00-7f01 r-xp 00000000 00:0e 12 {path}\n" for path in loaded)
        + "7f00-7f01 rw-p 0 00:00 0 \n"
    )
    assert software.foreign_libraries(maps, "/env") == ["/opt/x/libcudnn_ops.so.9", "/opt/x/libnccl.so.2"]


def test_failed_ranks_are_bad() -> None:
    failed = smoke.judged(Report(facts={"failure": "rank 1 of set A1 hung"}), "cuda")
    assert (failed.level, failed.text) == (Level.BAD, "GPUs, NCCL: rank 1 of set A1 hung")


def test_late_ranks_are_a_warning() -> None:
    """As on a machine that is only loaded."""
    finding = smoke.judged(Report(facts={}, problem="did not end within 8 s", late=True), "cpu")
    assert finding == late(Subject.SMOKE, "their all_reduce did not end within 8 s (CPU, gloo)")
    assert finding.level is Level.WARNING


# --- the summary


@pytest.mark.parametrize(
    ("gpus", "findings", "sentence"),
    [
        (0, [], "1 and 2 CPU ranks (gloo), eager and compiled steps; not: CUDA graphs and NCCL (no GPU)."),
        (1, [], "1 GPU rank, eager, compiled and captured steps; not: NCCL (one GPU)."),
        (4, [], "1 to 4 GPU ranks (NCCL), eager, compiled and captured steps."),
        (
            2,
            [warn(Subject.COMPILER, "none", "install"), warn(Subject.TORCHVISION, "none", "install")],
            "1 and 2 GPU ranks (NCCL), eager and captured steps; not: compiled steps (no compiler), "
            "torchvision's models and loader inputs.",
        ),
    ],
)
def test_summary_says_what_can_be_measured(
    monkeypatch: pytest.MonkeyPatch, gpus: int, findings: list[Finding], sentence: str
) -> None:
    monkeypatch.setattr(checks, "core_count", lambda: 2)
    found = one_for_each_subject([good(Subject.COMPILER, "g++"), *findings])
    assert what_can_be_measured([H200] * gpus, found) == f"This machine can measure: {sentence}"


def test_summary_names_what_must_be_repaired() -> None:
    found = one_for_each_subject(
        [bad(Subject.TORCH, "broken", "install"), bad(Subject.SMOKE, "failed", "repair")]
    )
    sentence = "This machine cannot measure until these are repaired: torch, two ranks."
    assert what_can_be_measured([], found) == sentence


def test_late_checks_leave_the_rest_measurable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "core_count", lambda: 1)
    subjects = Subject.COMPILER, Subject.TORCH, Subject.SMOKE
    found = one_for_each_subject([late(subject, "did not end within 8 s") for subject in subjects])
    summary = what_can_be_measured([], found)
    assert summary.startswith("This machine can measure: 1 CPU rank, eager and compiled steps; not: CUDA")
    assert summary.endswith(" Not checked in time: compiler, torch, two ranks.")


# --- the command


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """The findings of the command, in place of those of this machine."""
    findings = [good(Subject.COMPILER, "g++"), warn(Subject.FILES, "at most 64", "ulimit -n 1024")]
    monkeypatch.setattr(command, "all_findings", lambda gpus, seconds: one_for_each_subject(findings))
    monkeypatch.setattr(command, "visible_gpus", list)
    return findings


def test_command_prints_lines_and_a_summary(
    prepared: list[Finding], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert command.main([]) == 0
    *lines, empty, summary, rest = capsysbinary.readouterr().out.decode().splitlines()
    assert lines == finding_lines(list(one_for_each_subject(prepared).values()))
    assert empty == ""
    assert summary.startswith("This machine can measure: ")
    assert f"{summary} {rest}".endswith("Found 1 warning.")


def test_command_prints_one_json_document(
    prepared: list[Finding], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    prepared.append(bad(Subject.TORCH, "cannot be imported", "install torch again"))
    assert command.main(["--json"]) == 1
    document = json.loads(capsysbinary.readouterr().out)
    assert document["schema"] == 1
    assert document["hardware_key"].startswith("cpu")
    assert document["findings"][-1] == {
        "subject": "torch",
        "level": "bad",
        "text": "cannot be imported",
        "advice": "install torch again",
        "late": False,
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--xml"], "unrecognized arguments: --xml"),
        (["--seconds", "3"], "--seconds takes a number of at least 5, got 3"),
        (["--seconds", "nan"], "--seconds takes a number of at least 5, got nan"),
        (["--seconds", "soon"], "argument --seconds: invalid float value: 'soon'"),
    ],
)
def test_wrong_option_has_status_4(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="4"):
        command.main(arguments)
    assert capsys.readouterr().err == f"python -m ddpperf.doctor: {problem}; see --help\n"


def test_fast_checks_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run must not end because the kernel's files are missing."""
    for files in ("PROC", "CPUS", "HUGE_PAGES"):
        monkeypatch.setattr(system, files, Path("/nowhere"))
    unknown = {finding.subject for finding in run_findings("cpu", [])}
    assert not unknown & {Subject.LOAD, Subject.MEMORY, Subject.GOVERNOR, Subject.HUGE_PAGES}


def test_worst_finding_of_a_run_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = warn(Subject.LOAD, "other processes use 1.0 of 2 cores", "stop them")
    monkeypatch.setattr(system, "cpu_load", lambda seconds: busy)
    monkeypatch.setattr(system, "cpu_quota", lambda: 0.5)
    first, second, *_ = run_findings("cpu", [])
    assert (first.subject, first.level) == (Subject.CORES, Level.BAD)
    assert second is busy


# --- the line of a run


def test_run_stores_and_prints_its_findings(canned_suite: CannedSuite) -> None:
    busy = warn(Subject.LOAD, "process 9 (make) uses 1.0 core", "stop it, or wait until it ends")
    few = warn(Subject.FILES, "at most 64", "ulimit -n 1024")
    canned_suite.run_findings = lambda device, gpus: [busy, few]
    run = canned_suite.run("perf", "--report", "page.html", "--verdict", "page.md")
    line = "machine     CPU load: process 9 (make) uses 1.0 core. 2 findings: python -m ddpperf.doctor"
    assert line in run.lines
    assert line in (canned_suite.root / "page.md").read_text()
    assert "process 9 (make) uses 1.0 core" in (canned_suite.root / "page.html").read_text()
    (saved,) = canned_suite.saved_runs()
    assert saved["ddpperf"]["machine_findings"][0] == {
        "subject": "CPU load",
        "level": "warning",
        "text": "process 9 (make) uses 1.0 core",
        "advice": "stop it, or wait until it ends",
        "late": False,
    }
    del saved["ddpperf"]["machine_findings"]  # as in a run of an older version
    assert not [line for line in summary_lines(saved) if line.startswith("machine")]


def test_healthy_machine_has_no_line(canned_suite: CannedSuite) -> None:
    run = canned_suite.run("perf")
    assert run.status == 0
    assert not [line for line in run.lines if line.startswith("machine")]
