"""The device lock, held by real processes: one at a time, freed by a death, and without a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.device_lock import DeviceLock

REPOSITORY = Path(__file__).parents[2]

HOLDER = """
import subprocess, sys
from ddpperf.machine.device_lock import DeviceLock
lock = DeviceLock()
lock.acquire(sys.argv[1:])
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
sys.stdin.read()
lock.release()
print("released", flush=True)
child.wait()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of this test's own, and a temporary folder of its own for what they might leave."""
    monkeypatch.setenv("DDPPERF_LOCK_SCOPE", uuid.uuid4().hex)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def holder(*devices: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `devices` until its input ends, and has a child that lives longer."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *devices],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    child = process.stdout.readline()
    try:
        assert child.strip().isdecimal(), "the holder did not get its devices"
        yield process
    finally:
        process.kill()
        process.wait()
        if child:
            os.kill(int(child), 9)
        process.stdin.close()
        process.stdout.close()


def is_free(*devices: str) -> bool:
    lock = DeviceLock()
    try:
        lock.acquire(devices)
    except Refused:
        return False
    lock.release()
    return True


def test_every_other_process_is_refused_with_the_holders_id() -> None:
    """Nobody ever answers at the lock's socket: its queue must not fill up."""
    with holder("cpu") as process:
        sentence = f"^cpu is being measured by process {process.pid}; wait until that run ends, or stop it$"
        for _ in range(300):
            with pytest.raises(Refused, match=sentence):
                DeviceLock().acquire(["cpu"])
        assert process.poll() is None


def test_a_killed_holder_frees_the_device_though_its_child_lives() -> None:
    with holder("cpu") as process:
        assert not is_free("cpu")
        process.kill()
        process.wait()
        assert is_free("cpu")


def test_a_release_frees_the_device_though_the_process_lives() -> None:
    with holder("cpu", "GPU-a") as process:
        assert not is_free("GPU-a")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.stdout.readline() == "released\n"
        assert is_free("cpu", "GPU-a")
        assert process.poll() is None


def test_a_lock_leaves_no_file(folder: Path) -> None:
    lock = DeviceLock()
    lock.acquire(["cpu"])
    lock.release()
    with holder("cpu") as process:
        assert not is_free("cpu")
        process.kill()
        process.wait()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "devices", [["GPU-a", "GPU-b", "GPU-c"], ["GPU-c", "GPU-b", "GPU-a"], ["GPU-a", "GPU-c", "GPU-b"]]
)
def test_devices_are_taken_all_or_none(devices: list[str]) -> None:
    with holder("GPU-b"):
        lock = DeviceLock()
        with pytest.raises(Refused, match="GPU-b is being measured by process"):
            lock.acquire(devices)
        assert is_free("GPU-a", "GPU-c")


def test_a_lock_that_cannot_be_taken_is_not_said_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in the abstract namespace has at most 107 bytes."""
    monkeypatch.setenv("DDPPERF_LOCK_SCOPE", "x" * 200)
    with pytest.raises(Refused, match=r"the lock 'ddpperf/x+/cpu' cannot be taken: .*; choose another scope"):
        DeviceLock().acquire(["cpu"])


def test_other_devices_are_free() -> None:
    with holder("GPU-a", "GPU-b"):
        assert is_free("GPU-c", "cpu")
        assert not is_free("GPU-b")


def test_runs_of_another_scope_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with holder("cpu"):
        monkeypatch.setenv("DDPPERF_LOCK_SCOPE", uuid.uuid4().hex)
        assert is_free("cpu")


def test_releasing_again_leaves_the_next_holders_lock() -> None:
    first, second = DeviceLock(), DeviceLock()
    first.acquire(["cpu"])
    first.release()
    second.acquire(["cpu"])
    first.release()
    with pytest.raises(Refused, match=f"cpu is being measured by process {os.getpid()};"):
        first.acquire(["cpu"])
    second.release()
    assert is_free("cpu")
