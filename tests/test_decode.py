"""Decoded images are the files' own, in one order everywhere; what cannot be decoded is refused in a sentence with its name."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import pickle
import resource
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from ddpperf import decode
from ddpperf.decode import Refused, decode_cifar10, decode_folder, download_cifar10, save, shuffled
from tests.strategies import BOUNDED

CLASSES = ["ape", "bee", "cat"]


def picture(path: Path, seed: int, *, size: tuple[int, int] = (4, 3), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = torch.randint(256, (size[0] * size[1] * len(mode),), generator=torch.Generator().manual_seed(seed))
    Image.frombytes(mode, size, bytes(pixels.tolist())).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven images of each class to train and two to test, 4 wide and 3 high."""
    for split, count in (("train", 7), ("test", 2)):
        for number, name in enumerate(CLASSES):
            for each in range(count):
                picture(tmp_path / "images" / split / name / f"{each}.png", 100 * number + 10 * each + count)
    return tmp_path / "images"


def silent(line: str) -> None:
    pass


def by_torchvision(folder: Path) -> tuple[Tensor, list[int]]:
    dataset = ImageFolder(str(folder), transform=pil_to_tensor)
    return torch.stack([image for image, _ in dataset]), dataset.targets


@pytest.mark.parametrize("few", [0, 1000], ids=["workers", "no workers"])
def test_images_and_labels_are_torchvisions_in_the_shuffled_order(
    folder: Path, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "FEW_IMAGES", few)
    monkeypatch.setattr(decode, "BATCH_IMAGES", 4)
    document = decode_folder(folder, silent)
    assert document["classes"] == CLASSES
    for split, count in (("train", 21), ("test", 6)):
        images, labels = by_torchvision(folder / split)
        assert document[f"{split}_images"].shape == (count, 3, 3, 4)
        assert document[f"{split}_images"].dtype == torch.uint8
        assert document[f"{split}_labels"].dtype == torch.int64
        assert torch.equal(document[f"{split}_images"], images[shuffled(count)])
        assert document[f"{split}_labels"].tolist() == torch.tensor(labels)[shuffled(count)].tolist()


@pytest.mark.parametrize(("mode", "name"), [("L", "grey.png"), ("RGBA", "see_through.png"), ("RGB", "lossy.jpg")])
def test_every_image_becomes_rgb(folder: Path, mode: str, name: str) -> None:
    picture(folder / "test" / "ape" / name, 1, mode=mode)
    expected = pil_to_tensor(Image.open(folder / "test" / "ape" / name).convert("RGB"))
    images = decode_folder(folder, silent)["test_images"]
    assert any(torch.equal(image, expected) for image in images)


@BOUNDED
@given(st.integers(1, 3000))
def test_the_order_has_every_image_once_and_is_always_the_same(count: int) -> None:
    assert sorted(shuffled(count).tolist()) == list(range(count))
    assert torch.equal(shuffled(count), shuffled(count))


def test_the_first_images_are_a_fair_sample_of_all_classes() -> None:
    labels = torch.arange(10).repeat_interleave(5000)[shuffled(50_000)]
    assert all(400 < count < 600 for count in labels[:5000].bincount())


def test_it_is_said_what_is_decoded_and_how_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PROGRESS_SECONDS", 0)
    said: list[str] = []
    decode_folder(folder, said.append)
    assert said[:2] == [f"decoding 27 images of {folder}, once", "decoded 1 of 27 images"]
    assert said[-1] == "decoded 27 of 27 images"


def test_the_file_can_be_mapped_and_holds_the_document(folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "change",
    [
        lambda document, name=name: flip(document[name])
        for name in ("train_images", "train_labels", "test_images", "test_labels")
    ]
    + [lambda document: document.update(train_images=document["train_images"].transpose(2, 3).contiguous())],
    ids=["train_images", "train_labels", "test_images", "test_labels", "size"],
)
def test_the_digest_tells_other_images_and_labels(
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


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


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
@pytest.mark.parametrize("few", [0, 1000], ids=["workers", "no workers"])
def test_a_bad_folder_is_refused_in_a_sentence(
    folder: Path, spoil: Callable[[Path], object], sentence: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "FEW_IMAGES", few)
    spoil(folder)
    with pytest.raises(Refused, match=sentence) as refusal:
        decode_folder(folder, silent)
    assert "\n" not in str(refusal.value)


def test_more_images_than_memory_are_refused(folder: Path) -> None:
    dataset = ImageFolder(str(folder / "test"), loader=decode.load)
    with pytest.raises(Refused, match=r"^6 images need 18,000,000,000 MB of memory, more than there is; give fewer$"):
        decode._decode_all(dataset, (10**8, 10**7), lambda path, loaded: b"")


def test_a_full_disk_is_refused_with_the_bytes_that_are_needed(folder: Path, tmp_path: Path) -> None:
    document = decode_folder(folder, silent)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(Refused, match=r"^1 MB cannot be written to .* \(File too large\); make room there for them$"):
            save(document, tmp_path / "images.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small CIFAR-10 in its published form, with its own checksums put where torchvision keeps the published ones."""
    root = tmp_path / "cifar"
    generator = torch.Generator().manual_seed(0)
    md5: dict[str, str] = {}
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        pixels = torch.randint(256, (20, 3072), dtype=torch.uint8, generator=generator)
        labels = torch.randint(10, (20,), generator=generator)
        md5[name] = pickled(root / CIFAR10.base_folder / name, {"data": pixels.numpy(), "labels": labels.tolist()})
    md5["meta"] = pickled(root / CIFAR10.base_folder / "batches.meta", {"label_names": [f"class {i}" for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5[name]] for name, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5["meta"]})
    return root


def pickled(path: Path, content: object) -> str:
    put(path, pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_cifar10_is_torchvisions_in_the_shuffled_order(batches: Path) -> None:
    document = decode_cifar10(batches, silent)
    for split, count in (("train", 100), ("test", 20)):
        dataset = CIFAR10(root=str(batches), train=split == "train", transform=pil_to_tensor)
        images = torch.stack([image for image, _ in dataset])[shuffled(count)]
        assert torch.equal(document[f"{split}_images"], images)
        assert document[f"{split}_labels"].tolist() == torch.tensor(dataset.targets)[shuffled(count)].tolist()
    assert document["classes"] == [f"class {i}" for i in range(10)]


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("spoil", [Path.unlink, truncate])
def test_a_missing_or_damaged_file_of_cifar10_is_named(batches: Path, name: str, spoil: Callable[[Path], None]) -> None:
    spoil(batches / "cifar-10-batches-py" / name)
    with pytest.raises(Refused, match=rf"/cifar-10-batches-py/{name} is missing or damaged; cifar10:DIR needs"):
        decode_cifar10(batches, silent)


@pytest.fixture
def archive(batches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """CIFAR-10's archive, which torchvision takes from a server on this machine."""
    path = tmp_path / "served" / CIFAR10.filename
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        tar.add(batches / CIFAR10.base_folder, CIFAR10.base_folder)
    handler = functools.partial(Quiet, directory=str(path.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{path.name}")
        monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(path.read_bytes()).hexdigest())
        yield path
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def test_cifar10_is_downloaded_once(archive: Path, batches: Path, tmp_path: Path) -> None:
    said: list[str] = []
    root, out = tmp_path / "kept", tmp_path / "out"
    put(root / CIFAR10.base_folder / "test_batch", b"damaged")
    for _ in range(2):
        download_cifar10(root, out, said.append)
    assert said == ["downloading CIFAR-10 from 127.0.0.1, once"]
    assert [path.name for path in root.iterdir()] == [CIFAR10.base_folder]
    assert decode_cifar10(root, silent)["train_labels"].tolist() == decode_cifar10(batches, silent)["train_labels"].tolist()


@pytest.mark.parametrize(("spoil", "why"), [(Path.unlink, "HTTP Error 404: .*"), (truncate, "File not found or corrupted")])
def test_a_failed_download_is_refused_in_a_sentence(
    archive: Path, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(archive)
    sentence = rf"^CIFAR-10 cannot be downloaded from 127.0.0.1 \({why}\); pass cifar10:DIR with .*, or imagefolder:DIR$"
    with pytest.raises(Refused, match=sentence):
        download_cifar10(tmp_path / "kept", tmp_path / "out", silent)
    assert not (tmp_path / "kept").exists()
