"""Decoded images are the files' own, in one order everywhere, and nothing is left of a decoder whose starter is gone."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from ddpperf.data import decode
from ddpperf.data.decode import decode_folder, save, shuffled
from tests.generated import BOUNDED
from tests.images import CLASSES, images_in, picture, silent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images_in(tmp_path / "images")


@pytest.mark.parametrize("chunk", [4, 32], ids=["chunks", "one chunk"])
def test_images_and_labels_are_torchvisions_in_the_shuffled_order(
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
def test_the_digest_tells_other_images_and_labels(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    document = decode_folder(folder, silent)
    document["train_images"].zero_()  # so that another size does not mean another order of the bytes
    before = save(document, tmp_path / "images.pt")["digest"]
    change(document)
    assert save(document, tmp_path / "images.pt")["digest"] != before


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A process that runs ddpperf.data.decode's main, and the ends of its pipes."""

    process: BaseProcess
    standard_input: IO[bytes]
    answers: IO[bytes]

    def answer(self) -> Any:
        return json.loads(self.answers.readline())


@contextlib.contextmanager
def decoder(folder: Path, out: Path) -> Iterator[Decoder]:
    """A fork of this process, which has imported torch already; it is killed at the end."""
    from_starter, to_decoder = os.pipe()
    from_decoder, to_starter = os.pipe()

    def run() -> None:
        os.close(to_decoder)
        os.dup2(from_starter, 0)
        os.dup2(to_starter, 1)
        decode.main("imagefolder", str(folder), str(out))

    out.mkdir()
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    os.close(from_starter)
    os.close(to_starter)
    with open(to_decoder, "wb") as standard_input, open(from_decoder, "rb") as answers:
        try:
            yield Decoder(process=process, standard_input=standard_input, answers=answers)
        finally:
            process.kill()
            process.join()


def test_a_decoder_that_is_done_stays_until_its_standard_input_ends(folder: Path, tmp_path: Path) -> None:
    with decoder(folder, tmp_path / "out") as started:
        assert started.answer() == {"say": f"decoding 27 images of {folder}, once"}
        assert started.answer()["done"]["train_images"] == 21
        started.process.join(0.3)
        assert started.process.is_alive()
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["images.pt"]
        started.standard_input.close()
        started.process.join(5)
        assert not started.process.is_alive()
        assert not (tmp_path / "out").exists()


def test_a_decoder_ends_with_its_standard_input_and_takes_its_folder_away(
    folder: Path, tmp_path: Path
) -> None:
    os.mkfifo(folder / "train" / "bee" / "never_ends.png")
    with decoder(folder, tmp_path / "out") as started:
        assert "say" in started.answer()
        (tmp_path / "out" / "half").touch()
        started.standard_input.close()
        started.process.join(5)
        assert not started.process.is_alive()
        assert not (tmp_path / "out").exists()


def test_what_torchvision_prints_is_no_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ImageFolder, "__len__", lambda dataset: os.write(1, b"no answer\n") and len(dataset.samples)
    )
    with decoder(folder, tmp_path / "out") as started:
        assert "say" in started.answer()
        assert "done" in started.answer()


def test_what_is_refused_is_an_answer(folder: Path, tmp_path: Path) -> None:
    picture(folder / "train" / "dog" / "0.png", 1)
    with decoder(folder, tmp_path / "out") as started:
        assert "has the class 'dog' in train and not in test" in started.answer()["refused"]
