"""Decoded images equal torchvision's, in one order everywhere; bad folders are refused in one
sentence.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from ddpperf.data import decode
from ddpperf.data.decode import FORMATS, decode_folder, load, room_for, save, shuffled
from ddpperf.errors import Refused
from tests.generated import BOUNDED
from tests.images import CLASSES, images_in, picture, silent, truncate
from tests.project import full_disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images_in(tmp_path / "images")


@pytest.mark.parametrize("chunk", [4, 32], ids=["chunks", "one chunk"])
def test_images_and_labels_equal_torchvisions(
    folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "CHUNK_IMAGES", chunk)
    document = decode_folder(folder, silent)
    assert document["classes"] == CLASSES
    for split, count in (("train", 21), ("test", 6)):
        dataset = ImageFolder(str(folder / split), transform=pil_to_tensor)
        images = torch.stack([image for image, _ in dataset])
        assert document[f"{split}_images"].shape == (count, 3, 3, 4)
        assert document[f"{split}_images"].dtype == torch.uint8
        assert document[f"{split}_labels"].dtype == torch.int64
        assert torch.equal(document[f"{split}_images"], images[shuffled(count)])
        assert document[f"{split}_labels"].tolist() == torch.tensor(dataset.targets)[shuffled(count)].tolist()


@pytest.mark.parametrize(
    ("mode", "name"), [("L", "grey.png"), ("RGBA", "see_through.png"), ("RGB", "lossy.jpg")]
)
def test_every_image_becomes_rgb(folder: Path, mode: str, name: str) -> None:
    picture(folder / "test" / "ape" / name, 1, mode=mode)
    expected = pil_to_tensor(Image.open(folder / "test" / "ape" / name).convert("RGB"))
    images = decode_folder(folder, silent)["test_images"]
    assert any(torch.equal(image, expected) for image in images)


@BOUNDED
@given(st.integers(1, 3000))
def test_order_is_a_fixed_permutation(count: int) -> None:
    assert sorted(shuffled(count).tolist()) == list(range(count))
    assert torch.equal(shuffled(count), shuffled(count))


def test_first_images_sample_all_classes() -> None:
    labels = torch.arange(10).repeat_interleave(5000)[shuffled(50_000)]
    assert all(400 < count < 600 for count in labels[:5000].bincount())


def test_progress_names_folder_and_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PROGRESS_SECONDS", 0)
    said: list[str] = []
    decode_folder(folder, said.append)
    assert said[:2] == [f"decoding 27 images of {folder}, once", "decoded 1 of 27 images"]
    assert said[-1] == "decoded 27 of 27 images"


def test_file_can_be_mapped(folder: Path, tmp_path: Path) -> None:
    document = decode_folder(folder, silent)
    summary = save(document, tmp_path / "images.pt")
    loaded = torch.load(tmp_path / "images.pt", weights_only=True, mmap=True)
    assert loaded.keys() == {"train_images", "train_labels", "test_images", "test_labels", "classes"}
    assert loaded.pop("classes") == CLASSES
    assert all(torch.equal(loaded[name], document[name]) for name in loaded)
    assert summary.pop("digest")
    assert summary == {"train_images": 21, "test_images": 6, "classes": 3, "image_size": [3, 4]}
    torch.save(document, expected := io.BytesIO())
    assert (tmp_path / "images.pt").read_bytes() == expected.getvalue()


def test_equal_images_give_equal_files_and_digests(folder: Path, tmp_path: Path) -> None:
    first, second = (save(decode_folder(folder, silent), tmp_path / name) for name in ("1.pt", "2.pt"))
    assert first == second
    assert (tmp_path / "1.pt").read_bytes() == (tmp_path / "2.pt").read_bytes()


def flip(tensor: Tensor) -> None:
    tensor.view(-1)[-1] ^= 1


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "train_images": lambda document: flip(document["train_images"]),
    "train_labels": lambda document: flip(document["train_labels"]),
    "test_images": lambda document: flip(document["test_images"]),
    "test_labels": lambda document: flip(document["test_labels"]),
    "size": lambda document: document.update(
        train_images=document["train_images"].transpose(2, 3).contiguous()
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_images_or_labels_change_the_digest(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    document = decode_folder(folder, silent)
    document["train_images"].zero_()  # so that another size does not mean another order of the bytes
    before = save(document, tmp_path / "images.pt")["digest"]
    change(document)
    assert save(document, tmp_path / "images.pt")["digest"] != before


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (
        lambda f: put(f / "test/bee/x.jpg", b"hello"),
        r"/test/bee/x.jpg cannot be decoded \(it is no BMP, JPEG, PNG, PPM, TIFF or WEBP image\); repair or",
    ),
    "empty": (
        lambda f: put(f / "test/bee/x.jpg", b""),
        r"/test/bee/x.jpg cannot be decoded \(it is no BMP, JPEG, PNG, PPM, TIFF or WEBP image\); repair or",
    ),
    "truncated": (
        lambda f: truncate(picture(f / "train/cat/x.jpg", 1, size=(64, 64))),
        r"/train/cat/x.jpg cannot be decoded \(.*truncated.*\); repair or remove it$",
    ),
    "damaged png": (
        lambda f: truncate(f / "train/ape/0.png"),
        r"/train/ape/0.png cannot be decoded \(.*\); repair or remove",
    ),
    "dead link": (
        lambda f: (f / "train/ape/x.png").symlink_to("gone"),
        r"/ape/x.png cannot be decoded \(.*No such file",
    ),
    "sizes": (
        lambda f: picture(f / "test/cat/x.png", 1, size=(3, 4)),
        r"one size, but .*/train/ape/0.png has 4x3 pixels and .*/test/cat/x.png has 3x4; "
        r"resize them, or leave one out$",
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
        r"images must have images of every class in train/<class> and test/<class>: "
        r"Found no valid file for the classes dog, ",
    ),
    "no classes": (
        lambda f: [f.joinpath("test", name).rename(f / name) for name in CLASSES],
        r"images must have images of every class .*: Couldn't find any class folder in .*/test$",
    ),
}


@pytest.mark.parametrize(("spoil", "sentence"), BAD.values(), ids=BAD)
def test_bad_folder_is_refused(folder: Path, spoil: Callable[[Path], object], sentence: str) -> None:
    spoil(folder)
    with pytest.raises(Refused, match=sentence) as refusal:
        decode_folder(folder, silent)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program gs on the path, and the file that it leaves when it is started."""
    mark, program = tmp_path / "started", tmp_path / "bin" / "gs"
    put(program, f"#!/bin/sh\ntouch {mark}\n".encode())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # what an earlier image has found
    return mark


def test_eps_named_png_starts_no_program(folder: Path, ghostscript: Path) -> None:
    path = folder / "train/ape/x.png"
    Image.new("RGB", (4, 3)).save(path, format="EPS")
    with pytest.raises(Refused, match=r"/ape/x.png cannot be decoded \(it is no BMP, .* image\); repair or"):
        decode_folder(folder, silent)
    assert not ghostscript.exists()
    with contextlib.suppress(OSError), Image.open(path) as image:
        image.load()
    assert ghostscript.exists(), "Pillow would have started it"


@pytest.mark.parametrize("kind", FORMATS)
def test_each_named_format_is_decoded(kind: str, tmp_path: Path) -> None:
    pixels = Image.frombytes("RGB", (4, 3), bytes(range(36)))
    pixels.save(tmp_path / "x.png", format=kind)
    found = load(str(tmp_path / "x.png"))
    assert found.shape == (3, 4, 3)
    assert kind in ("JPEG", "WEBP") or found.tobytes() == pixels.tobytes(), "the others lose nothing"


def test_pillows_errors_become_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 4
    )  # above twice as many it raises an error of its own, no OSError
    sentence = (
        r"/0.png cannot be decoded \(Image size \(12 pixels\) exceeds limit of 8 .*\); repair or remove it$"
    )
    with pytest.raises(Refused, match=sentence):
        decode_folder(folder, silent)


def test_first_of_several_bad_images_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_full_disk_is_refused_with_the_needed_bytes(folder: Path, tmp_path: Path) -> None:
    document = decode_folder(folder, silent)
    with (
        full_disk(),
        pytest.raises(
            Refused, match=r"^1 MB cannot be written to .* \(File too large\); make room there for them$"
        ),
    ):
        save(document, tmp_path / "images.pt")


@pytest.mark.parametrize("wrong", [False, True])
def test_result_or_refusal_is_written_as_json(folder: Path, tmp_path: Path, wrong: bool) -> None:
    if wrong:
        picture(folder / "train" / "dog" / "0.png", 1)
    decode.write_result("imagefolder", folder, tmp_path, silent)
    result = json.loads((tmp_path / "result.json").read_text())
    if wrong:
        assert "has the class 'dog' in train and not in test" in result["refused"]
    else:
        assert result["train_images"] == 21


def test_output_of_torchvision_is_no_progress(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        ImageFolder, "__len__", lambda dataset: os.write(1, b"no progress\n") and len(dataset.samples)
    )
    standard_output = os.dup(1)
    try:
        decode.main("imagefolder", str(folder), str(tmp_path))
    finally:
        os.dup2(standard_output, 1)
    captured = capfd.readouterr()
    assert captured.out == f"decoding 27 images of {folder}, once\n"
    assert "no progress" in captured.err
