"""The doctor's two ranks really run, and what keeps them from it is found in time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddpperf.doctor.cpu_and_memory import cpu_load
from ddpperf.doctor.findings import Level
from ddpperf.doctor.two_ranks import rank_findings
from tests.project import HANG_SECONDS, REPOSITORY, Marked


def run(environment: Mapping[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def test_two_ranks_exchange_data() -> None:
    found = rank_findings([], seconds=HANG_SECONDS)
    assert {subject: finding.level for subject, finding in found.items()} == {
        "torch": Level.GOOD,
        "two ranks": Level.GOOD,
    }
    assert found["two ranks"].text.startswith("all_reduce of 1 MiB in ")


def test_busy_core_is_found_and_not_this_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], env={}) as spinning:
        os.sched_setaffinity(spinning.pid, {min(os.sched_getaffinity(0))})
        finding = cpu_load(())
        spinning.kill()
    assert finding.level is Level.WARNING
    assert f" {os.getpid()} (" not in finding.text


# --- imports that fail


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError('libcudart.so.99: not found')", "libcudart.so.99: not found"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with status -11"),
        ("", "torch"),  # such as an experiment of this folder named torch.py
    ],
)
def test_torch_that_fails_to_import_is_bad(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, why: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (finding,) = rank_findings([], seconds=HANG_SECONDS).values()
    assert finding.level is Level.BAD
    assert why in finding.text


@pytest.mark.slow
def test_doctor_that_is_too_slow_ends_in_time(marked: Marked, tmp_path: Path) -> None:
    """The ranks hang in the import of torch, and are killed with all that they started."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time; time.sleep(600)")
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    began = time.monotonic()
    ended = run(marked.environment | variables, "-m", "ddpperf.doctor", "--seconds", "5")
    assert time.monotonic() - began < 8
    assert ended.returncode == 0
    assert "two ranks    did not end within" in ended.stdout
    assert "Traceback" not in ended.stderr
    marked.assert_nothing_left()


# --- the command


def test_doctor_needs_only_the_standard_library() -> None:
    """It must run where numpy or torch cannot be imported, because that is what it finds."""
    code = "import sys, ddpperf.doctor.__main__; print({'torch', 'numpy', 'scipy'} & sys.modules.keys())"
    assert run(os.environ, "-c", code).stdout == "set()\n"


def test_older_python_is_refused_in_one_sentence() -> None:
    code = "import sys; sys.version_info = (3, 10, 4, 'final', 0); import ddpperf.doctor.__main__"
    ended = run(os.environ, "-c", code)
    assert ended.returncode == 1
    assert ended.stderr == "ddpperf needs Python 3.11 or newer, this is Python 3.10; use a newer one\n"


def test_measured_devices_are_left_alone(marked: Marked) -> None:
    """A test run holds the lock of the CPU, and two more ranks would disturb its times."""
    with (marked.locks / "ddpperf-cpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = run(marked.environment, "-m", "ddpperf.doctor")
    assert ended.returncode == 0
    (line,) = (line for line in ended.stdout.splitlines() if "two ranks" in line)
    assert line.startswith("warning  two ranks    not tried; cpu is being measured by ")
