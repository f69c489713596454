"""Decodes a folder of images, or CIFAR-10, into one file of tensors; `plugin/dataset.py` runs it in a process of its own.

    python -m ddpperf.data.decode imagefolder|cifar10|download SOURCE OUT

It writes OUT/images.pt, which `torch.load(path, weights_only=True, mmap=True)` reads: train_images uint8 [N, 3, H, W] (RGB),
train_labels int64 [N], test_images, test_labels, and classes, the names in the labels' order. Its standard output is an object
of JSON a line: {"say": a line for the user}, and last {"done": what `save` returns} or {"refused": a sentence}. Then it waits.
It ends when its standard input does, at any time, and takes OUT away.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import math
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy
import torch
from PIL import UnidentifiedImageError
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.datasets.utils import check_integrity

PROGRESS_SECONDS = 5.0
CHUNK_IMAGES = 32  # that a thread takes at a time
MOST_THREADS = 8  # more would wait for the interpreter's lock
NETWORK_SECONDS = 30.0
DOWNLOAD_BYTES = 540_000_000  # the archive, what is in it, and the tensors
DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

Say = Callable[[str], None]


class Refused(Exception):
    """The images cannot be had; one sentence says why, and what to do."""


def decode_folder(folder: Path, say: Say) -> dict[str, Any]:
    """What images.pt is to hold, from folder/train/<class>/ and folder/test/<class>/; raises Refused."""
    try:
        train, test = (ImageFolder(str(folder / split)) for split in ("train", "test"))
    except OSError as error:
        found = str(error).removesuffix(".").replace(". Supported", ", supported")
        raise Refused(
            f"{folder} must have images of every class in train/<class> and test/<class>: {found}"
        ) from error
    if different := sorted(set(train.classes) ^ set(test.classes)):
        there, missing = ("train", "test") if different[0] in train.classes else ("test", "train")
        raise Refused(
            f"{folder} has the class {different[0]!r} in {there} and not in {missing}; both must have all classes"
        )
    total = len(train) + len(test)
    say(f"decoding {total:,} images of {folder}, once")
    first: str = train.samples[0][0]
    height, width, _ = load(first).shape
    images = [room_for(len(split), height, width) for split in (train, test)]

    def put(task: tuple[str, Any]) -> None:
        path, place = task
        pixels = load(path)
        if pixels.shape != place.shape:
            sizes = f"{first} has {width}x{height} pixels and {path} has {pixels.shape[1]}x{pixels.shape[0]}"
            raise Refused(f"all images must have one size, but {sizes}; resize them, or leave one out")
        place[:] = pixels

    tasks = [task for split, room in zip((train, test), images, strict=True) for task in _places(split, room)]
    told = time.monotonic()
    with ThreadPool(
        min(len(os.sched_getaffinity(0)), MOST_THREADS)
    ) as threads:  # Pillow decodes without that lock
        for done, _ in enumerate(threads.imap(put, tasks, chunksize=CHUNK_IMAGES), start=1):
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                say(f"decoded {done:,} of {total:,} images")
    return _document(train, images[0], test, images[1])


def load(path: str) -> Any:
    """An image file's pixels, a numpy array uint8 [H, W, 3] (RGB); raises Refused."""
    try:
        return numpy.asarray(pil_loader(path))
    except UnidentifiedImageError:
        why = "it is no image"
    except Exception as error:  # Pillow raises most kinds for damaged files
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    raise Refused(f"{path} cannot be decoded ({why}); repair or remove it")


def room_for(count: int, height: int, width: int) -> Tensor:
    """A tensor for so many images, uint8 [count, 3, height, width]; raises Refused."""
    try:
        return torch.empty((count, 3, height, width), dtype=torch.uint8)
    except RuntimeError as error:
        megabytes = math.ceil(count * 3 * height * width / 1e6)
        raise Refused(
            f"{count:,} images need {megabytes:,} MB of memory, more than there is; give fewer"
        ) from error


def _places(dataset: Any, images: Tensor) -> Iterator[tuple[str, Any]]:
    """The path of each image of an ImageFolder, and where its pixels belong in `images`, an array uint8 [H, W, 3]."""
    rows = images.numpy().transpose(0, 2, 3, 1)
    for (path, _), place in zip(dataset.samples, shuffled(len(dataset)).argsort().tolist(), strict=True):
        yield path, rows[place]


def shuffled(count: int) -> Tensor:
    """The order in which so many images are stored, always the same: the first ones are a fair sample of all classes."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def _document(train: Any, train_images: Tensor, test: Any, test_images: Tensor) -> dict[str, Any]:
    """The images, already in the shuffled order, with their datasets' labels and classes."""
    train_labels, test_labels = (torch.tensor(each.targets)[shuffled(len(each))] for each in (train, test))
    labels = {"train_labels": train_labels, "test_labels": test_labels}
    return {
        "train_images": train_images,
        "test_images": test_images,
        **labels,
        "classes": list(train.classes),
    }


def decode_cifar10(root: Path, say: Say) -> dict[str, Any]:
    """What images.pt is to hold, from root/cifar-10-batches-py as torchvision has it; raises Refused."""
    if wrong := _wrong_cifar10(root):
        raise Refused(
            f"{wrong} is missing or damaged; cifar10:DIR needs CIFAR-10's six batches and batches.meta as published"
        )
    train, test = (CIFAR10(root=str(root), train=train) for train in (True, False))
    say(f"decoding {len(train) + len(test):,} images of {root}, once")

    def images(dataset: Any) -> Tensor:
        return torch.from_numpy(dataset.data).permute(0, 3, 1, 2)[shuffled(len(dataset))].contiguous()

    return _document(train, images(train), test, images(test))


def _wrong_cifar10(root: Path) -> Path | None:
    """The first of CIFAR-10's files that has not the checksum which torchvision knows."""
    known = [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], CIFAR10.meta["md5"])]
    files = [(root / CIFAR10.base_folder / name, md5) for name, md5 in known]
    return next((path for path, md5 in files if not check_integrity(str(path), md5)), None)


def download_cifar10(root: Path, out: Path, say: Say) -> None:
    """Have CIFAR-10 below `root`, where it appears whole or not at all; raises Refused."""
    if not _wrong_cifar10(root):
        return
    host = urlsplit(CIFAR10.url).hostname
    say(f"downloading CIFAR-10 from {host}, once")
    socket.setdefaulttimeout(NETWORK_SECONDS)
    try:
        CIFAR10(root=str(out / "cifar10"), download=True)
        (out / "cifar10" / CIFAR10.filename).unlink()
        shutil.rmtree(root, ignore_errors=True)
        os.replace(out / "cifar10", root)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise _disk_full(root.parent, DOWNLOAD_BYTES, error) from error
        why = str(error).removeprefix("<urlopen error ").removesuffix(">").removesuffix(".")
        instead = "pass cifar10:DIR with a copy of it, or imagefolder:DIR"
        raise Refused(f"CIFAR-10 cannot be downloaded from {host} ({why}); {instead}") from error


def _disk_full(folder: Path, nbytes: int, error: OSError) -> Refused:
    return Refused(
        f"{math.ceil(nbytes / 1e6):,} MB cannot be written to {folder} ({error.strerror}); make room there for them"
    )


def save(document: dict[str, Any], path: Path) -> dict[str, object]:
    """Write the tensors to the disk; raises Refused where they do not fit.

    digest: 12 hex digits of a sha256 over the images and labels. classes: how many. image_size: height and width.
    """
    tensors = [value for value in document.values() if isinstance(value, Tensor)]
    nbytes = (
        sum(tensor.nbytes for tensor in tensors)
        + sum(len(name.encode()) for name in document["classes"])
        + 10_000
    )
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # torch.save would hide why it fails
            torch.save(document, file)
            file.truncate()
            os.fsync(file.fileno())
    except OSError as error:
        raise _disk_full(path.parent.parent, nbytes, error) from error
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{list(tensor.shape)}".encode())
        digest.update(tensor.flatten().numpy().data)
    return {
        "digest": digest.hexdigest()[:12],
        "train_images": len(document["train_labels"]),
        "test_images": len(document["test_labels"]),
        "classes": len(document["classes"]),
        "image_size": list(document["train_images"].shape[2:]),
    }


def decode(kind: str, source: Path, out: Path, say: Say) -> dict[str, object]:
    """Write out/images.pt and return what `save` does; raises Refused."""
    if kind == "download":
        download_cifar10(source, out, say)
    document = decode_folder(source, say) if kind == "imagefolder" else decode_cifar10(source, say)
    return save(document, out / "images.pt")


def _end_with_starter(out: Path) -> None:
    """Wait for the end of standard input; then nothing of this process and its files may be left."""
    while os.read(0, 1):
        pass
    shutil.rmtree(out, ignore_errors=True)
    os._exit(1)  # whatever the other threads wait for


def main(kind: str, source: str, out: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torchvision prints is no answer

    def tell(**answer: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the starter is gone, and so will this process be
            print(json.dumps(answer), file=answers, flush=True)

    ending = threading.Thread(target=_end_with_starter, args=(Path(out),), daemon=True)
    ending.start()
    try:
        tell(done=decode(kind, Path(source), Path(out), lambda line: tell(say=line)))
    except Refused as refusal:
        tell(refused=str(refusal))
    ending.join()  # until the starter has moved images.pt: it may be killed before


if __name__ == "__main__":
    main(*sys.argv[1:])
