"""A folder whose images cannot be decoded is refused in a sentence that names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from ddpperf.data import decode
from ddpperf.data.decode import Refused, decode_folder, room_for, save
from tests.images import CLASSES, images_in, picture, silent, truncate
from tests.project import full_disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images_in(tmp_path / "images")


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda f: put(f / "test/bee/x.jpg", b"hello"), r"/test/bee/x.jpg cannot be decoded \(it is no image\); repair or"),
    "empty": (lambda f: put(f / "test/bee/x.jpg", b""), r"/test/bee/x.jpg cannot be decoded \(it is no image\); repair or"),
    "truncated": (
        lambda f: truncate(picture(f / "train/cat/x.jpg", 1, size=(64, 64))),
        r"/train/cat/x.jpg cannot be decoded \(.*truncated.*\); repair or remove it$",
    ),
    "damaged png": (lambda f: truncate(f / "train/ape/0.png"), r"/train/ape/0.png cannot be decoded \(.*\); repair or remove"),
    "dead link": (lambda f: (f / "train/ape/x.png").symlink_to("gone"), r"/ape/x.png cannot be decoded \(.*No such file"),
    "sizes": (
        lambda f: picture(f / "test/cat/x.png", 1, size=(3, 4)),
        r"one size, but .*/train/ape/0.png has 4x3 pixels and .*/test/cat/x.png has 3x4; resize them, or leave one out$",
    ),
    "class only in test": (
        lambda f: picture(f / "test/dog/0.png", 1),
        r"images has the class 'dog' in test and not in train; both must have all classes$",
    ),
    "class only in train": (
        lambda f: picture(f / "train/ant/0.png", 1),
        r"images has the class 'ant' in train and not in test; both must have all classes$",
    ),
    "class without images": (
        lambda f: put(f / "train/dog/notes.txt", b"no image"),
        r"images must have images of every class in train/<class> and test/<class>: Found no valid file for the classes dog, ",
    ),
    "no classes": (
        lambda f: [f.joinpath("test", name).rename(f / name) for name in CLASSES],
        r"images must have images of every class .*: Couldn't find any class folder in .*/test$",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "sentence"), BAD.values(), ids=BAD)
def test_a_bad_folder_is_refused_in_a_sentence(
    folder: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    spoil(folder)
    with pytest.raises(Refused, match=sentence) as refusal:
        decode_folder(folder, silent)
    assert "\n" not in str(refusal.value)


def test_whatever_pillow_raises_is_said_in_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 4
    )  # above twice as many it raises an error of its own, no OSError
    sentence = r"/0.png cannot be decoded \(Image size \(12 pixels\) exceeds limit of 8 pixels, .*\); repair or remove it$"
    with pytest.raises(Refused, match=sentence):
        decode_folder(folder, silent)


def test_the_first_of_several_bad_images_is_the_one_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "CHUNK_IMAGES", 1)
    for name in ("train/bee/3.png", "train/bee/5.png", "train/cat/0.png", "test/ape/0.png"):
        put(folder / name, b"hello")
    with pytest.raises(Refused, match=r"/train/bee/3.png cannot be decoded"):
        decode_folder(folder, silent)


def test_more_images_than_memory_are_refused() -> None:
    with pytest.raises(
        Refused, match=r"^6 images need 18,000,000,000 MB of memory, more than there is; give fewer$"
    ):
        room_for(6, 10**7, 10**8)


def test_a_full_disk_is_refused_with_the_bytes_that_are_needed(folder: Path, tmp_path: Path) -> None:
    document = decode_folder(folder, silent)
    with (
        full_disk(),
        pytest.raises(
            Refused, match=r"^1 MB cannot be written to .* \(File too large\); make room there for them$"
        ),
    ):
        save(document, tmp_path / "images.pt")
