"""Files that are not regular or too large, wherever a run reads files: refused, and never waited for."""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ddpperf.data import decode
from ddpperf.errors import CannotTrain, Refused
from ddpperf.node.handshake import read_key
from ddpperf.node.hostfile import read_hostfile
from ddpperf.regular_files import open_regular, read_text
from ddpperf.results.stored_runs import NoBaseline, read_document
from ddpperf.training import checkpoint
from ddpperf.verdict import settings
from ddpperf.verdict.thresholds import read_threshold_file
from perf.common import recipes


@contextmanager
def socket_at(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        yield


@contextmanager
def fifo_at(path: Path) -> Iterator[None]:
    os.mkfifo(path)
    yield


@contextmanager
def device_at(path: Path) -> Iterator[None]:
    path.symlink_to("/dev/zero")  # without an end
    yield


KINDS = {"fifo": fifo_at, "socket": socket_at, "device": device_at}


def read_recipes(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "FOLDER", path.parent)
        recipes.read_recipes("cpu")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "stored run": ("0001_x.json", read_document),
    "thresholds": (settings.NAME, lambda path: read_threshold_file(path.parents[1])),
    "recipes": ("recipes.toml", read_recipes),
    "hostfile": ("hosts", lambda path: read_hostfile(path, 2)),
    "key": ("key", read_key),
    "image": ("0.png", lambda path: decode.load(str(path))),
    "checkpoint": ("x.pt", lambda path: checkpoint.load(path, {}, torch.device("cpu"))),
}


@pytest.mark.timeout(20)  # a FIFO without a writer blocks the process that opens it
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", READERS)
def test_irregular_file_is_refused(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, read = READERS[what]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(path.parent)  # a socket's path has at most 107 bytes
    with (
        KINDS[kind](Path(path.name)),
        pytest.raises((NoBaseline, Refused, CannotTrain, ValueError), match="not a regular file") as refusal,
    ):
        read(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("what", ["stored run", "thresholds", "recipes", "hostfile"])
def test_huge_file_is_refused_unread(what: str, tmp_path: Path) -> None:
    name, read = READERS[what]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, 10**9)  # takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises((NoBaseline, Refused, ValueError), match=r"it has 1,000.0 MB, and at most \d+ MB"):
            read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2e6


def test_file_of_unknown_size_is_limited() -> None:
    """A file of /proc has no size before it is read."""
    with pytest.raises(OSError, match="at most 0 MB are read"):
        read_text("/proc/self/maps", 100)


def test_regular_file_is_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"x"
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
