"""CIFAR-10 is decoded as torchvision does it, downloaded once, and refused if a file is damaged."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import pickle
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import CIFAR10
from torchvision.transforms.functional import pil_to_tensor

from ddpperf.data.decode import decode_cifar10, download_cifar10, shuffled, write_result
from ddpperf.errors import Refused
from tests.images import silent, truncate


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small CIFAR-10 in its published form, with its own checksums put where torchvision keeps
    the published ones.
    """
    root = tmp_path / "cifar"
    (root / CIFAR10.base_folder).mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    md5: dict[str, str] = {}
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        pixels = torch.randint(256, (20, 3072), dtype=torch.uint8, generator=generator)
        labels = torch.randint(10, (20,), generator=generator)
        md5[name] = pickled(
            root / CIFAR10.base_folder / name, {"data": pixels.numpy(), "labels": labels.tolist()}
        )
    md5["meta"] = pickled(
        root / CIFAR10.base_folder / "batches.meta", {"label_names": [f"class {i}" for i in range(10)]}
    )
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5[name]] for name, _ in CIFAR10.test_list])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5["meta"]})
    return root


def pickled(path: Path, content: object) -> str:
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_images_and_labels_equal_torchvisions(batches: Path) -> None:
    said: list[str] = []
    document = decode_cifar10(batches, said.append)
    assert said == [f"decoding 120 images of {batches}, once"]
    for split, count in (("train", 100), ("test", 20)):
        dataset = CIFAR10(root=str(batches), train=split == "train", transform=pil_to_tensor)
        images = torch.stack([image for image, _ in dataset])[shuffled(count)]
        assert torch.equal(document[f"{split}_images"], images)
        assert document[f"{split}_labels"].tolist() == torch.tensor(dataset.targets)[shuffled(count)].tolist()
    assert document["classes"] == [f"class {i}" for i in range(10)]


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("spoil", [Path.unlink, truncate])
def test_missing_or_damaged_file_is_named(batches: Path, name: str, spoil: Callable[[Path], None]) -> None:
    spoil(batches / "cifar-10-batches-py" / name)
    with pytest.raises(
        Refused, match=rf"/cifar-10-batches-py/{name} is missing or damaged; cifar10:DIR needs"
    ):
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
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/{path.name}")
        monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(path.read_bytes()).hexdigest())
        yield path
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def test_cifar10_is_downloaded_once(archive: Path, batches: Path, tmp_path: Path) -> None:
    root, out = tmp_path / "kept", tmp_path / "out"
    (root / CIFAR10.base_folder).mkdir(parents=True)
    (root / CIFAR10.base_folder / "test_batch").write_bytes(b"damaged")
    out.mkdir()
    said: list[str] = []

    def decoded(kind: str, source: Path, say: Callable[[str], None]) -> dict[str, Any]:
        write_result(kind, source, out, say)
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result

    first, second = (decoded("download", root, said.append) for _ in range(2))
    decoding = f"decoding 120 images of {root}, once"
    assert said == ["downloading CIFAR-10 from 127.0.0.1, once", decoding, decoding]
    assert [path.name for path in root.iterdir()] == [CIFAR10.base_folder]
    assert {path.name for path in out.iterdir()} == {"images.pt", "result.json"}
    assert first == second == decoded("cifar10", batches, silent)
    assert (first["train_images"], first["test_images"], first["classes"]) == (100, 20, 10)


@pytest.mark.parametrize(
    ("spoil", "why"), [(Path.unlink, "HTTP Error 404: .*"), (truncate, "File not found or corrupted")]
)
def test_failed_download_is_refused(
    archive: Path, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    spoil(archive)
    sentence = (
        rf"^CIFAR-10 cannot be downloaded from 127.0.0.1 \({why}\); pass cifar10:DIR .*, or imagefolder:DIR$"
    )
    with pytest.raises(Refused, match=sentence):
        download_cifar10(tmp_path / "kept", tmp_path / "out", silent)
    assert not (tmp_path / "kept").exists()
