"""The device lock: one run at a time, all devices or none. Two locks of one process refuse each
other, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.machine.device_lock import lock_devices


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDPPERF_LOCK_FOLDER", str(tmp_path))
    return tmp_path


def test_devices_are_locked_all_or_none() -> None:
    held = lock_devices(["GPU-b"])
    sentence = f"^GPU-b is being measured by process {os.getpid()}; wait until that run ends, or stop it$"
    with pytest.raises(Refused, match=sentence):
        lock_devices(["GPU-a", "GPU-b", "GPU-c"])
    lock_devices(["GPU-a", "GPU-c"]).close()
    held.close()
    lock_devices(["GPU-b"]).close()


def test_other_users_can_lock_afterwards(folder: Path) -> None:
    lock_devices(["cpu"]).close()
    assert (folder / "ddpperf-cpu.lock").stat().st_mode & 0o777 == 0o666


def test_folder_that_is_missing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPPERF_LOCK_FOLDER", str(folder / "missing"))
    sentence = (
        r"^the lock file /.*/missing/ddpperf-cpu.lock cannot be written \(No such file or directory\); set"
    )
    with pytest.raises(Refused, match=sentence):
        lock_devices(["cpu"])
