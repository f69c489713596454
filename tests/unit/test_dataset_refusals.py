"""Images that cannot be had are refused in a sentence, and nothing is left of the try."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpperf.data.cache import prepare
from ddpperf.errors import Refused
from tests.images import images_in, silent
from tests.project import full_disk


def refused(text: str, folder: Path, sentence: str) -> None:
    """`prepare` refuses in a sentence, and leaves nothing in its folder."""
    with pytest.raises(Refused, match=sentence) as refusal:
        prepare(text, folder, silent)
    assert "\n" not in str(refusal.value)
    assert not folder.is_dir() or list(folder.iterdir()) == []


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return images_in(tmp_path / "images")


BAD: dict[str, tuple[str, str]] = {
    "unknown": ("foo", r"^--data must be synthetic, cifar10\[:DIR\] or imagefolder:DIR, got 'foo'; pass one of them$"),
    "nothing": ("", r"^--data must be .*, got ''; pass one of them$"),
    "synthetic with a folder": ("synthetic:x", r"^--data must be .*, got 'synthetic:x'; pass one of them$"),
    "empty folder": ("cifar10:", r"^--data must be .*, got 'cifar10:'; pass one of them$"),
    "no folder": ("imagefolder", r"^--data imagefolder needs a folder; pass imagefolder:DIR with DIR/train/<class>/\* and"),
    "missing": ("imagefolder:gone", r"^--data imagefolder needs a folder, but /.*/gone does not exist; pass imagefolder:DIR$"),
    "long": ("imagefolder:" + "x" * 5000, r"^--data imagefolder needs a folder, but /.* does not exist; pass imagefolder:DIR$"),
    "a file": ("cifar10:file", r"^--data cifar10 needs a folder, but /.*/file is no folder; pass cifar10:DIR$"),
    "no train": ("imagefolder:empty", r"needs DIR/train/<class>/\* and DIR/test/<class>/\*, but /.*/empty has no folder train"),
    "no test": ("imagefolder:half", r"^--data imagefolder:DIR needs .*, but /.*/half has no folder test; add it$"),
    "no batches": ("cifar10:empty", r"^--data cifar10:DIR needs DIR/cifar-10-batches-py, but /.*/empty has no folder cifar"),
    "a loop": ("imagefolder:loop", r"^/.*/train/bee/loop/.* cannot be read \(Too many levels of symbolic links\); make it"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), BAD.values(), ids=BAD)
def test_what_names_no_images_is_refused_in_a_sentence(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "train").mkdir(parents=True)
    (tmp_path / "file").touch()
    (images_in(tmp_path / "loop") / "train" / "bee" / "loop").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    refused(text, tmp_path / "data", sentence)


def test_what_the_process_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    sentence = r"^CIFAR-10 cannot be downloaded from www.cs.toronto.edu \(.*Connection refused\); pass cifar10:DIR with a copy"
    refused("cifar10", tmp_path / "data", sentence)


def test_a_full_disk_is_refused_with_the_bytes_that_are_needed(images: Path, tmp_path: Path) -> None:
    with full_disk():
        sentence = r"^1 MB cannot be written to /.*/data \(File too large\); make room there for them$"
        refused(f"imagefolder:{images}", tmp_path / "data", sentence)


def test_a_process_that_dies_is_said_with_the_end_of_its_output(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sentence = r"were not decoded: the process exited with status 1 before it answered \(RuntimeError: operator torchvision::nms"
    refused(f"imagefolder:{images}", tmp_path / "data", sentence)


@pytest.mark.parametrize("folder", ["file/data", "/sys/data"])
def test_a_cache_that_cannot_be_kept_is_refused(images: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    sentence = r"^decoded images cannot be kept in /.*/data \((Not a directory|Operation not permitted|Permission denied)\); see"
    refused(f"imagefolder:{images}", tmp_path / folder, sentence)
