"""Ranks with loaders that are killed: nothing of them stays in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddpperf.io import private_folders
from ddpperf.io.private_folders import SHARED_MEMORY
from ddpperf.specs import EpochSpec, to_json
from ddpperf.workers.failures import SetFailure
from ddpperf.workers.interpreter import Side
from ddpperf.workers.process_set import ProcessSet, SetOptions
from tests.project import Marked, wait_until

pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is None, reason="a dataloader's transforms are torchvision's"
)
LOADS = EpochSpec(
    world_size=1,
    per_rank_batch_size=8,
    strategy="single",
    input="dataloader",
    loader_workers=1,
    epoch_images=32,
)


@pytest.fixture
def leaves_nothing(marked: Marked) -> Iterator[Marked]:
    yield marked
    marked.assert_nothing_left()


def loading(size: int = 1) -> ProcessSet:
    """Return a process set whose rank 0 has a loader."""
    live = ProcessSet("A1", Side(), SetOptions(size=size, device="cpu", rounds=1, deadline_seconds=60))
    live.spawn()
    live.wait_ready()
    live.request("open", ranks=[0], spec=to_json(LOADS))
    live.request("sample", ranks=[0], iterations=1)
    assert semaphores(live._folder.path), "a loader's semaphores are named after the private folder"
    return live


def semaphores(folder: Path) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"sem.{folder.name}-*"))


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_killed_rank_leaves_no_semaphores() -> None:
    live = loading()
    timer = threading.Timer(0.3, os.kill, [live.pids[0], signal.SIGKILL])
    timer.start()
    with pytest.raises(SetFailure, match=r"^rank 0 of set A1 was killed by SIGKILL"):
        live.request("sample", iterations=10**6)
    timer.join()


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_killed_set_leaves_no_shared_memory() -> None:
    """Nor does a loader that is killed between making shared memory and removing its name."""
    live = loading()
    others = Path(f"/proc/{live.pids[0]}/task/{live.pids[0]}/children").read_text().split()
    assert others
    left = SHARED_MEMORY / f"torch_{others[-1]}_123_0"
    of_others = SHARED_MEMORY / f"torch_{os.getpid()}_123_0"
    for path in (left, of_others):
        path.touch()
    live.kill()
    assert semaphores(live._folder.path) == []
    assert of_others.exists(), "other processes' memory stays"
    of_others.unlink()
    assert not left.exists()


@pytest.mark.slow
def test_loader_works_with_a_long_temporary_path(
    leaves_nothing: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path may have 107 bytes; the private folder is below /tmp instead."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(private_folders, "SHORT_ROOT", str(leaves_nothing.folder))
    live = loading()
    live.request("close", ranks=[0])
    live.close()


CONTROLLER = """
import time
from tests.ranks.test_shared_memory import loading
live = loading(2)
print(live._folder.path, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_killed_controller_leaves_no_semaphores(leaves_nothing: Marked) -> None:
    command = [sys.executable, "-c", CONTROLLER]
    with subprocess.Popen(command, env=leaves_nothing.environment, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        folder = Path(controller.stdout.readline().decode().strip())
        assert semaphores(folder)
        controller.kill()
    wait_until(lambda: not semaphores(folder), 2, lambda: f"left: {semaphores(folder)}")
