"""Real images: decoded as torchvision does, read from a whole cache only, refused in one sentence.

The decoder runs in this process; tests/ranks/test_decode_process.py starts it as a child.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from urllib.response import addinfourl

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from ddpperf.data import cache as cache_module
from ddpperf.data import decode
from ddpperf.data.cache import prepare
from ddpperf.data.decode import save
from ddpperf.errors import Refused
from tests.images import images_in, picture, silent, truncate
from tests.project import full_disk


@pytest.fixture(autouse=True)
def _decode_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in this process instead of a child, which would have to import torch."""

    def run(
        command: Sequence[str], variables: Mapping[str, str], seconds: float, on_line: Callable[[str], None]
    ) -> CompletedProcess[str]:
        monkeypatch.setattr(decode, "say", on_line)
        try:
            decode.main(*command[-3:])
        except SystemExit as refusal:
            return CompletedProcess([], 1, "", f"a warning\n{refusal}\n")
        return CompletedProcess([], 0, "", "")

    monkeypatch.setattr(cache_module, "run_child", run)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images_in(tmp_path / "images")


@pytest.fixture
def cache(folder: Path, tmp_path: Path) -> Path:
    path = prepare(f"imagefolder:{folder}", tmp_path / "cache", silent).path
    assert path is not None
    return path


def assert_as_torchvision(path: Path | None, parts: Sequence[Any]) -> None:
    assert path is not None
    stored = torch.load(path, weights_only=True, mmap=True)
    for name, part in zip(("train", "test"), parts, strict=True):
        order = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))
        assert torch.equal(stored[f"{name}_images"], torch.stack([image for image, _ in part])[order])
        assert torch.equal(stored[f"{name}_labels"], torch.tensor(part.targets)[order])


def test_image_folder_is_decoded_as_torchvision_does(folder: Path, tmp_path: Path) -> None:
    for mode, name in (("L", "grey.png"), ("RGBA", "see_through.png"), ("RGB", "lossy.jpg")):
        picture(folder / "train" / "ape" / name, 1, mode=mode)
    said: list[str] = []
    data = prepare(f"imagefolder:{folder}", tmp_path / "cache", said.append)
    assert said == [f"decoding the images of {folder}, once"]
    assert (data.name, data.train_images, data.test_images, data.classes) == ("imagefolder", 24, 6, 3)
    assert (len(data.digest), data.image_size) == (12, (3, 4))
    parts = [ImageFolder(str(folder / part), transform=pil_to_tensor) for part in ("train", "test")]
    assert_as_torchvision(data.path, parts)


def test_grey_images_of_16_bits_keep_their_upper_bits(folder: Path, tmp_path: Path) -> None:
    values = [[0, 255, 256, 511], [512, 4096, 32768, 65535], [1, 2, 3, 65280]]
    Image.fromarray(np.array(values, dtype=np.uint16)).save(image := tmp_path / "x.png")
    expected = [[0, 0, 1, 1], [2, 16, 128, 255], [0, 0, 0, 255]]
    assert np.asarray(decode.load(str(image)))[..., 0].tolist() == expected


def test_images_are_known_by_their_content(folder: Path, tmp_path: Path) -> None:
    """Their names say nothing, or are in capitals; files of file managers do not count."""
    for number, path in enumerate(sorted(folder.glob("train/*/*.png"))):
        path.rename(path.with_name(f"{number:04}{('', '.jfif', '.PNG')[number % 3]}"))
    for name in (".DS_Store", "Thumbs.db"):
        put(folder / "train" / "ape" / name, b"no image")
    assert prepare(f"imagefolder:{folder}", tmp_path / "cache", silent).train_images == 21


@pytest.mark.parametrize("name", ["train_images", "train_labels", "test_images", "test_labels"])
def test_any_change_changes_the_digest(folder: Path, tmp_path: Path, name: str) -> None:
    decoded = decode.decode(decode.data_sets("imagefolder", folder, download=False))
    before, same = (save(decoded, tmp_path / "images.pt")["digest"] for _ in range(2))
    decoded[name].view(-1)[-1] ^= 1
    assert before == same != save(decoded, tmp_path / "images.pt")["digest"]


# --- the cache


def test_whole_cache_is_used_without_a_word(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setenv("HOME", str(folder.parent))
    for text in (f"imagefolder:{folder}/../{folder.name}/", f"imagefolder:~/{folder.name}"):
        assert prepare(text, cache.parent, pytest.fail).path == cache


def touch(folder: Path, cache: Path) -> None:
    image = folder / "test" / "bee" / "0.png"
    os.utime(image, ns=(0, image.stat().st_mtime_ns + 1))


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "cut tensors": lambda folder, cache: truncate(cache),
    "cut sidecar": lambda folder, cache: truncate(cache.with_suffix(".json")),
    "changed image": touch,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_damaged_or_changed_images_are_decoded_again(
    folder: Path, cache: Path, change: Callable[[Path, Path], object]
) -> None:
    before = cache.read_bytes()
    change(folder, cache)
    said: list[str] = []
    assert prepare(f"imagefolder:{folder}", cache.parent, said.append).path == cache
    assert said == [f"decoding the images of {folder}, once"]
    assert cache.read_bytes() == before
    assert set(cache.parent.iterdir()) == {cache, cache.with_suffix(".json")}


# --- refusals


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def save_text(*paths: Path) -> None:
    for path in paths:
        put(path, b"no image")


def save_all(image: Image.Image, folder: Path) -> None:
    for path in folder.glob("*/*/*.png"):
        image.save(path)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda f: put(f / "test/bee/x.jpg", b"hello"), "bee/x.jpg cannot be decoded as BMP, JPEG, "),
    "dead link": (lambda f: (f / "train/ape/x.png").symlink_to("gone"), "ape/x.png cannot .*No such file"),
    "sizes": (
        lambda f: picture(f / "test/cat/x.png", 1, size=(3, 4)),
        "one size, but .*/cat/x.png has 3x4 pixels and others have 4x3; resize it, or leave it out$",
    ),
    "class only in test": (
        lambda f: picture(f / "test/dog/0.png", 1),
        "the same classes .* only one has 'dog",
    ),
    "class without images": (
        lambda f: put(f / "train/dog/notes.txt", b"no image"),
        "1 file in .* cannot be decoded as BMP, .*, such as .*/dog/notes.txt; repair or remove them",
    ),
    "no images by name or content": (
        lambda f: save_text(f / "train/ape/1", f / "train/ape/2.txt"),
        "2 files in .* cannot be decoded as BMP, .*, such as .*/ape/.*; repair or remove them",
    ),
    "floating-point numbers": (
        lambda f: Image.new("F", (4, 3)).save(f / "train/ape/x.tiff"),
        "ape/x.tiff cannot .*its pixels are no whole numbers from 0 to 65535",
    ),
    "one colour": (
        lambda f: save_all(Image.new("I;16", (4, 3), 200), f),
        r"the pixels of the train images have almost one value \(0 of 255\); check that their files",
    ),
    "no test": (lambda f: (f / "test").rename(f / "x"), "cannot be read from .*No such file or directory"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("spoil", "sentence"), BAD.values(), ids=BAD)
def test_bad_folder_is_refused(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    spoil(folder)
    refused(f"imagefolder:{folder}", tmp_path / "cache", sentence)


def refused(text: str, cache: Path, sentence: str) -> None:
    """Check that `prepare` refuses in one sentence and leaves nothing in the cache."""
    with pytest.raises(Refused, match=sentence) as refusal:
        prepare(text, cache, silent)
    assert "\n" not in str(refusal.value)
    assert not cache.is_dir() or not list(cache.iterdir())


@pytest.mark.parametrize("text", ["cifar100", "imagefolder:", "/images"])
def test_unknown_data_is_refused(text: str, tmp_path: Path) -> None:
    refused(text, tmp_path / "cache", f"^--data must be synthetic, .*, got {text!r}; pass one of them$")


def test_eps_named_png_starts_no_program(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, program, image = tmp_path / "started", tmp_path / "bin" / "gs", folder / "train/ape/x.png"
    put(program, f"#!/bin/sh\ntouch {started}\n".encode())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # what an earlier image has found
    Image.new("RGB", (4, 3)).save(image, format="EPS")
    refused(f"imagefolder:{folder}", tmp_path / "cache", "/ape/x.png cannot be decoded as BMP")
    assert not started.exists()
    with contextlib.suppress(OSError), Image.open(image) as opened:
        opened.load()
    assert started.exists(), "Pillow would have started it"


def test_full_disk_is_refused(folder: Path, tmp_path: Path) -> None:
    for number in range(100):
        picture(folder / "train" / "ape" / f"more{number}.png", number)
    with full_disk():
        refused(f"imagefolder:{folder}", tmp_path / "data", r"/data cannot hold them \(.*\); make room")


def test_cache_that_cannot_be_stored_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(
        f"imagefolder:{folder}", tmp_path / "file" / "data", "make /.*/data writable and free space there$"
    )


# --- CIFAR-10


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small CIFAR-10, whose checksums are where torchvision keeps the published ones."""
    root = tmp_path / "cifar"
    base = root / CIFAR10.base_folder
    generator = torch.Generator().manual_seed(0)
    meta = {"label_names": [f"class {i}" for i in range(10)]}
    contents: dict[str, object] = {CIFAR10.meta["filename"]: meta}
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        pixels = torch.randint(256, (20, 3072), dtype=torch.uint8, generator=generator)
        contents[name] = {"data": pixels.numpy(), "labels": torch.randint(10, (20,)).tolist()}
    for name, content in contents.items():
        put(base / name, pickle.dumps(content))
    md5 = {name: hashlib.md5((base / name).read_bytes()).hexdigest() for name in contents}
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5[name]] for name, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5[CIFAR10.meta["filename"]]})
    archive = tmp_path / "served" / CIFAR10.filename
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(base, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    return root


def test_cifar10_is_decoded_as_torchvision_does(batches: Path, tmp_path: Path) -> None:
    data = prepare(f"cifar10:{batches}", tmp_path / "cache", silent)
    assert (data.train_images, data.test_images, data.classes, data.image_size) == (100, 20, 10, (32, 32))
    parts = [CIFAR10(str(batches), train=train, transform=pil_to_tensor) for train in (True, False)]
    assert_as_torchvision(data.path, parts)


@pytest.fixture
def archive(batches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's archive, which torchvision gets as a file instead of an answer of a server."""
    served: Path = tmp_path / "served" / CIFAR10.filename

    def answer(*_: object) -> Any:
        file = open(served, "rb")  # noqa: SIM115
        return addinfourl(file, Message(), CIFAR10.url)

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.setattr(addinfourl, "length", None, raising=False)
    return served


@pytest.mark.usefixtures("archive")
def test_cifar10_is_downloaded_once(batches: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first, second = (prepare("cifar10", tmp_path / "cache", said.append) for _ in range(2))
    assert said == ["downloading the images of CIFAR-10, once"]
    assert first == second
    assert first.digest == prepare(f"cifar10:{batches}", tmp_path / "cache", silent).digest
    assert len(list((tmp_path / "cache").iterdir())) == 4, "files and sidecars"


def test_damaged_cifar10_is_refused(batches: Path, tmp_path: Path) -> None:
    truncate(batches / "cifar-10-batches-py" / "data_batch_3")
    refused(f"cifar10:{batches}", tmp_path / "cache", "cifar10 cannot be read from /.*; pass synthetic, cif")


def test_failed_download_is_refused(archive: Path, tmp_path: Path) -> None:
    truncate(archive)
    refused("cifar10", tmp_path / "cache", "cifar10 cannot be downloaded .*; pass synthetic, cifar10")
