"""Checkpoint files: any change of their bytes is found, and nothing in them is executed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpperf.errors import CannotTrain
from ddpperf.specs import RunSpec, to_json
from ddpperf.training import checkpoint
from ddpperf.workers.process_set import MOST_SUMMARY_LETTERS

CPU = torch.device("cpu")
FLIPS = 250
SPEC = RunSpec(
    world_size=1,
    strategy="single",
    input="device",
    per_rank_batch_size=8,
    epochs=1,
    test_images=8,
    rate=0.1,
)
AGAIN = r"; remove it to start again$"
DAMAGED = rf"x.pt is damaged: its content does not fit its SHA-256{AGAIN}"
UNKNOWN = rf"x.pt has no checksum: it is cut short, or an older ddpperf wrote it{AGAIN}"


def saved(folder: Path, **change: Any) -> Path:
    state = {"model": {"weight": torch.arange(1000.0)}, "history": [{"loss": 1.0}]}
    path = folder / "x.pt"
    checkpoint.save(path, to_json(dataclasses.replace(SPEC, **change)), state)
    return path


def load(path: Path) -> Any:
    return checkpoint.load(path, to_json(SPEC), CPU)


def test_whole_checkpoint_is_read_back(tmp_path: Path) -> None:
    state = load(saved(tmp_path))
    assert torch.equal(state["model"]["weight"], torch.arange(1000.0))
    assert state["history"] == [{"loss": 1.0}]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Of 250 bits all over the file; torch.load alone notices few of them."""
    path, generator = saved(tmp_path), random.Random(0)
    content = bytearray(path.read_bytes())
    places = [*generator.sample(range(8 * len(content)), FLIPS - 16), *range(8), *range(-8, 0)]
    for place in places:
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        with pytest.raises(CannotTrain, match=f"{DAMAGED}|{UNKNOWN}"):
            load(path)
        content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    assert load(path) is not None


@pytest.mark.parametrize("kept", [0, 1, 40, 1000, -1, -64, -80])
def test_cut_checkpoint_is_refused(kept: int, tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CannotTrain, match=UNKNOWN):
        load(path)


def test_longer_checkpoint_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(CannotTrain, match=UNKNOWN):
        load(path)


def test_swapped_checkpoint_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, seed=1)
    with pytest.raises(
        CannotTrain, match=r"x.pt is of another training: seed 1, not 0; remove it, or name another folder$"
    ):
        load(path)


def test_checkpoint_without_checksum_is_refused(tmp_path: Path) -> None:
    """As older versions wrote it."""
    stored = {"version": checkpoint.VERSION, "torch": str(torch.__version__), "spec": to_json(SPEC)}
    torch.save(stored | {"state": {}}, tmp_path / "x.pt")
    with pytest.raises(CannotTrain, match=UNKNOWN):
        load(tmp_path / "x.pt")


class Executed:
    """An object whose unpickling makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.mark),)


def damage(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damage, "is damaged: its content does not fit its SHA-256"),
        (make_fifo, r"cannot be read \(it is not a regular file\)"),
        (make_folder, r"cannot be read \(Is a directory\)"),
        (
            lambda path: path.write_bytes(b""),
            "has no checksum: it is cut short, or an older ddpperf wrote it",
        ),
        (lambda path: signed(path, "x"), "was not written by this version of ddpperf"),
    ],
    ids=["damaged", "FIFO", "folder", "empty", "other"],
)
def test_long_path_hides_no_advice(change: Callable[[Path], object], why: str, tmp_path: Path) -> None:
    """A run prints the first 200 letters of what a rank raised."""
    folder = tmp_path / ("long" * 60)
    folder.mkdir()
    path = saved(folder)
    change(path)
    with pytest.raises(
        CannotTrain, match=rf"^the checkpoint /.*\.\.\..*longlong/x\.pt {why}{AGAIN}"
    ) as refusal:
        load(path)
    assert len(f"CannotTrain: {refusal.value}") <= MOST_SUMMARY_LETTERS


def signed(path: Path, stored: object) -> Path:
    """Write anything as a checkpoint with the right checksum."""
    torch.save(stored, path)
    content = path.read_bytes()
    path.write_bytes(content + checkpoint.LABEL + hashlib.sha256(content).hexdigest().encode())
    return path


def test_signed_code_is_not_executed(tmp_path: Path) -> None:
    path = signed(tmp_path / "x.pt", {"version": checkpoint.VERSION, "state": Executed(tmp_path / "mark")})
    with pytest.raises(
        CannotTrain, match=r"x.pt cannot be read \(.*\); remove it to start again$"
    ) as refusal:
        load(path)
    assert len(str(refusal.value).replace(str(tmp_path), "")) < 300
    assert not (tmp_path / "mark").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "mark").exists(), "it would have been executed"


WHOLE = {"version": checkpoint.VERSION, "torch": str(torch.__version__), "spec": to_json(SPEC), "state": {}}


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        ([1], "was not written by this version of ddpperf"),
        (WHOLE | {"version": 3}, "was not written by this version of ddpperf"),
        *((WHOLE | {name: 7}, f"holds no {name}") for name in ("torch", "spec", "state")),
        (WHOLE | {"torch": "2.11.9"}, r"was written by torch 2.11.9, but this is .*, which may train"),
        (WHOLE | {"spec": {1: 2, "x" * 999: "y" * 999}}, "is of another training: 1 2, not None"),
    ],
)
def test_signed_nonsense_is_refused(stored: object, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match=sentence) as refusal:
        load(signed(tmp_path / "x.pt", stored))
    assert len(str(refusal.value).replace(str(tmp_path), "")) < 300


@pytest.mark.figures
def test_checksum_of_a_checkpoint_is_cheap(
    tmp_path: Path, figure: Callable[[str, Callable[[], float], float, str], None]
) -> None:
    """Of ResNet-18 with its momentum, 90 MB."""
    path = tmp_path / "x.pt"
    state = {"model": {"weight": torch.zeros(11_200_000)}, "optimizer": {0: torch.zeros(11_200_000)}}

    def added() -> float:
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(5):
            began = time.process_time()
            checkpoint.save(path, to_json(SPEC), state)
            load(path)
            seconds["with"].append(time.process_time() - began)
            began = time.process_time()
            with path.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            torch.load(path, weights_only=True)
            seconds["without"].append(time.process_time() - began)
        return statistics.median(seconds["with"]) - statistics.median(seconds["without"])

    figure("CPU time added to saving and loading a checkpoint of 90 MB", added, 0.3, "s")
