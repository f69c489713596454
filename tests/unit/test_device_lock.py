"""The device lock: one run at a time, all devices or none. Two locks of one process refuse each
other, too.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.device_lock import lock_devices


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDPPERF_LOCK_FOLDER", str(tmp_path))
    return tmp_path


def held(*devices: str) -> ExitStack:
    return lock_devices(devices)


def is_free(*devices: str) -> bool:
    try:
        held(*devices).close()
    except Refused:
        return False
    return True


def test_second_run_is_refused_with_the_holders_id() -> None:
    held_lock = held("cpu")
    sentence = f"^cpu is being measured by process {os.getpid()}; wait until that run ends, or stop it$"
    with pytest.raises(Refused, match=sentence):
        held("cpu")
    assert held_lock


def test_devices_are_locked_all_or_none() -> None:
    held_lock = held("GPU-b")
    with pytest.raises(Refused, match=r"^GPU-b is being measured by process"):
        held("GPU-a", "GPU-b", "GPU-c")
    assert is_free("GPU-a", "GPU-c")
    assert held_lock


def test_other_users_can_lock_afterwards(folder: Path) -> None:
    held("cpu").close()
    assert (folder / "ddpperf-cpu.lock").stat().st_mode & 0o777 == 0o666


def test_folder_that_is_missing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPPERF_LOCK_FOLDER", str(folder / "missing"))
    sentence = (
        r"^the lock file /.*/missing/ddpperf-cpu.lock cannot be written \(No such file or directory\); set"
    )
    with pytest.raises(Refused, match=sentence):
        held("cpu")


def test_second_release_keeps_the_next_holders_lock() -> None:
    first = held("cpu")
    first.close()
    second = held("cpu")
    first.close()
    assert not is_free("cpu")
    second.close()
    assert is_free("cpu")
