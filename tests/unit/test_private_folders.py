"""Temporary folders: what killed processes left is removed, what is in use is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.io import private_folders
from ddpperf.io.private_folders import PrivateFolder, remove_abandoned_folders, temporary_root
from tests.project import REPOSITORY

OWNER = """
import time
from ddpperf.io.private_folders import PrivateFolder
print(PrivateFolder().path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short temporary folder, as a socket's path needs it."""
    remove_abandoned_folders.cache_clear()
    with tempfile.TemporaryDirectory(prefix="t") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)
    remove_abandoned_folders.cache_clear()


@pytest.fixture
def owner(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a private folder, and the path of the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=os.environ | {"TMPDIR": str(root), "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_folder_is_private_and_removed(root: Path) -> None:
    with PrivateFolder() as folder:
        (folder / "file").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert list(root.iterdir()) == []


def test_folder_of_a_killed_process_is_removed(owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, theirs = owner
    (theirs / "file").touch()
    semaphore = private_folders.SHARED_MEMORY / f"sem.{theirs.name}-12345678"
    semaphore.touch()
    process.kill()
    process.wait()
    assert theirs.is_dir()
    with PrivateFolder() as ours:
        assert not theirs.exists()
        assert not semaphore.exists()
        assert ours.is_dir()


def test_folder_is_held_by_a_second_process(owner: tuple[subprocess.Popen[str], Path]) -> None:
    """A rank uses the folder of its controller, which was killed."""
    process, theirs = owner
    with PrivateFolder():
        assert theirs.is_dir(), "its owner lives"
    remove_abandoned_folders.cache_clear()
    held = private_folders.hold(theirs)
    process.kill()
    process.wait()
    with PrivateFolder():
        assert theirs.is_dir()
    os.close(held)


def test_long_temporary_path_is_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "/" + "x" * (private_folders.MOST_ROOT_BYTES - 1)
    monkeypatch.setattr(tempfile, "tempdir", longest)
    assert temporary_root() == longest
    monkeypatch.setattr(tempfile, "tempdir", longest + "x")
    monkeypatch.setattr(private_folders, "SHORT_ROOT", str(root))
    with PrivateFolder() as folder:
        assert folder.parent == root


def test_missing_temporary_folder_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(root / "missing"))
    words = r"cannot be made in .*/missing \(No such file or directory\); free space there, or set TMPDIR"
    with pytest.raises(Refused, match=words):
        PrivateFolder()
