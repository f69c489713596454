"""Files that are not regular, wherever a run reads files: refused in one sentence, and never waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpperf.data import decode
from ddpperf.errors import Refused
from ddpperf.results.stored_runs import NoBaseline, read_document
from ddpperf.verdict import settings
from ddpperf.verdict.thresholds import read_threshold_file
from perf.common import recipes


def read_recipes(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "FOLDER", path.parent)
        recipes.read_recipes("cpu")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "stored run": ("0001_x.json", read_document),
    "thresholds": (settings.NAME, lambda path: read_threshold_file(path.parents[1])),
    "recipes": ("recipes.toml", read_recipes),
    "image": ("0.png", lambda path: decode.load(str(path))),
}


@pytest.mark.timeout(20)  # a FIFO without a writer blocks the process that opens it
@pytest.mark.parametrize("what", READERS)
def test_fifo_and_device_are_refused(what: str, tmp_path: Path) -> None:
    name, read = READERS[what]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(path)
        with pytest.raises((NoBaseline, Refused, ValueError), match="not a regular file") as refusal:
            read(path)
        assert "\n" not in str(refusal.value)
        path.unlink()
