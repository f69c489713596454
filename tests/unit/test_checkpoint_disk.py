"""A checkpoint on a full disk: the option and the path are named, and nothing is left."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from ddpperf.errors import CannotTrain
from ddpperf.training import checkpoint
from tests.project import full_disk

FULL = r"^the checkpoint {} cannot be written \({}\); free space there, or change --checkpoints$"


def test_full_disk_names_the_option_and_the_path(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    state = {"model": {"weight": torch.zeros(100_000)}}
    words = FULL.format(re.escape(checkpoint._named(path)), "File too large")
    with full_disk(), pytest.raises(CannotTrain, match=words):
        checkpoint.save(path, {}, state)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_at_the_end_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    path = tmp_path / "run.pt"
    with pytest.raises(
        CannotTrain, match=FULL.format(re.escape(checkpoint._named(path)), "No space left on device")
    ):
        checkpoint.save(path, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "run.pt"
    with pytest.raises(
        CannotTrain, match=FULL.format(re.escape(checkpoint._named(path)), "No such file or directory")
    ):
        checkpoint.save(path, {}, {})
