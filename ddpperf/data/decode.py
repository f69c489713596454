"""Decode a folder of images, or CIFAR-10, into one file of tensors.

    python -m ddpperf.data.decode imagefolder|cifar10|download SOURCE OUT

ddpperf/data/cache.py runs this module as a child process. torch.load reads the file OUT/images.pt.
It holds train_images uint8 [N, 3, H, W] (RGB), train_labels int64 [N], test_images, test_labels,
and classes, the class names in the order of the labels. OUT/result.json holds the summary that
`save` returns, or {"refused": one sentence}. Lines about progress go to standard output.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.utils import check_integrity

from ddpperf.errors import Refused, first_line
from ddpperf.io.files import open_regular

PROGRESS_SECONDS = 5.0
CHUNK_IMAGES = 32  # that a thread decodes at a time
MAX_THREADS = 8  # more would wait for the interpreter's lock
NETWORK_SECONDS = 30.0
MOST_PIXELS = 4096**2  # of an image
DOWNLOAD_BYTES = 540_000_000  # the archive, its files, and the tensors
# Pillow chooses a format by a file's content, and some formats start programs: EPS starts Ghostscript.
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)

Say = Callable[[str], None]


def decode_folder(folder: Path, say: Say) -> dict[str, Any]:
    """Decode the images in folder/train/<class> and folder/test/<class>, or raise Refused."""
    try:
        train, test = (ImageFolder(str(folder / split)) for split in ("train", "test"))
    except OSError as error:
        found = str(error).removesuffix(".").replace(". Supported", ", supported")
        needed = "must have images of every class in train/<class> and test/<class>"
        raise Refused(f"{folder} {needed}: {found}") from error
    if different := sorted(set(train.classes) ^ set(test.classes)):
        name = different[0]
        where = "train and not in test" if name in train.classes else "test and not in train"
        raise Refused(f"{folder} has the class {name!r} in {where}; both must have all classes")
    total = len(train) + len(test)
    say(f"decoding {total:,} images of {folder}, once")
    first = train.samples[0][0]
    height, width, _ = load(first).shape
    images = [room_for(len(split), height, width) for split in (train, test)]
    tasks: list[tuple[str, Any]] = []  # each file, and the array uint8 [H, W, 3] that receives its pixels
    for split, room in zip((train, test), images, strict=True):
        rows, places = room.numpy().transpose(0, 2, 3, 1), shuffled(len(split)).argsort().tolist()
        tasks += [(path, rows[place]) for (path, _), place in zip(split.samples, places, strict=True)]

    def put(task: tuple[str, Any]) -> None:
        path, place = task
        pixels = load(path)
        if pixels.shape != place.shape:
            sizes = f"{first} has {width}x{height} pixels and {path} has {pixels.shape[1]}x{pixels.shape[0]}"
            raise Refused(f"all images must have one size, but {sizes}; resize them, or leave one out")
        place[:] = pixels

    reported = time.monotonic()
    with ThreadPool(min(len(os.sched_getaffinity(0)), MAX_THREADS)) as threads:
        for done, _ in enumerate(threads.imap(put, tasks, chunksize=CHUNK_IMAGES), start=1):
            if time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                say(f"decoded {done:,} of {total:,} images")
    return _document(train, images[0], test, images[1])


def load(path: str) -> Any:
    """Return an image file's pixels as numpy uint8 [H, W, 3] (RGB), or raise Refused."""
    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            if (pixels := image.width * image.height) > MOST_PIXELS:
                raise ValueError(f"it has {pixels:,} pixels, and at most {MOST_PIXELS:,} are decoded")
            return numpy.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        why = f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image"
    except OSError as error:
        why = error.strerror or first_line(error)
    except Exception as error:  # Pillow raises most kinds for damaged files
        why = first_line(error) if str(error).strip() else type(error).__name__
    raise Refused(f"{path} cannot be decoded ({why}); repair or remove it")


def room_for(count: int, height: int, width: int) -> Tensor:
    """Allocate a tensor uint8 [count, 3, height, width], or raise Refused if memory is short."""
    try:
        return torch.empty((count, 3, height, width), dtype=torch.uint8)
    except RuntimeError as error:
        need = f"{count:,} images need {math.ceil(count * 3 * height * width / 1e6):,} MB of memory"
        raise Refused(f"{need}, more than there is; give fewer") from error


def shuffled(count: int) -> Tensor:
    """Return a fixed random order of `count` images, so that the first images have all classes."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def _document(train: Any, train_images: Tensor, test: Any, test_images: Tensor) -> dict[str, Any]:
    document: dict[str, Any] = {"train_images": train_images, "test_images": test_images}
    for name, split in (("train", train), ("test", test)):
        document[f"{name}_labels"] = torch.tensor(split.targets)[shuffled(len(split))]
    return {**document, "classes": list(train.classes)}


def decode_cifar10(root: Path, say: Say) -> dict[str, Any]:
    """Decode CIFAR-10's files in root/cifar-10-batches-py into tensors, or raise Refused."""
    if wrong := _wrong_cifar10(root):
        needed = "cifar10:DIR needs CIFAR-10's six batches and batches.meta as published"
        raise Refused(f"{wrong} is missing or damaged; {needed}")
    train, test = (CIFAR10(root=str(root), train=train) for train in (True, False))
    say(f"decoding {len(train) + len(test):,} images of {root}, once")

    def images(dataset: Any) -> Tensor:
        return torch.from_numpy(dataset.data).permute(0, 3, 1, 2)[shuffled(len(dataset))].contiguous()

    return _document(train, images(train), test, images(test))


def _wrong_cifar10(root: Path) -> Path | None:
    """Return the first CIFAR-10 file that is missing or damaged, or None if all are right."""
    known = [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], CIFAR10.meta["md5"])]
    files = [(root / CIFAR10.base_folder / name, md5) for name, md5 in known]
    return next((path for path, md5 in files if not check_integrity(str(path), md5)), None)


def download_cifar10(root: Path, out: Path, say: Say) -> None:
    """Download CIFAR-10 into `root`, unless `root` holds its files already.

    A failed download leaves no partial files in `root`. Raises Refused if the download fails.
    """
    if not _wrong_cifar10(root):
        return
    host = urlsplit(CIFAR10.url).hostname
    say(f"downloading CIFAR-10 from {host}, once")
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
    what = f"{math.ceil(nbytes / 1e6):,} MB cannot be written to {folder}"
    return Refused(f"{what} ({error.strerror}); make room there for them")


def save(document: dict[str, Any], path: Path) -> dict[str, object]:
    """Write decoded images and labels to the file `path` and return a summary of them.

    digest: 12 hex digits of a sha256 over images and labels. classes: the number of classes.
    image_size: height and width in pixels. Raises Refused if the disk is full.
    """
    tensors = [value for value in document.values() if isinstance(value, Tensor)]
    nbytes = 10_000 + sum(tensor.nbytes for tensor in tensors)
    nbytes += sum(len(name.encode()) for name in document["classes"])
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


def write_result(kind: str, source: Path, out: Path, say: Say) -> None:
    """Decode images into out/images.pt, and write their summary or a refusal to out/result.json."""
    try:
        if kind == "download":
            download_cifar10(source, out, say)
        document = decode_folder(source, say) if kind == "imagefolder" else decode_cifar10(source, say)
        result = save(document, out / "images.pt")
    except Refused as refusal:
        result = {"refused": str(refusal)}
        (out / "images.pt").unlink(missing_ok=True)  # on a full disk it leaves no room for the refusal
    (out / "result.json").write_text(json.dumps(result), encoding="utf-8")


def main(kind: str, source: str, out: str) -> None:
    """Decode images as a command-line program. What torchvision prints goes to standard error."""
    progress = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)
    write_result(kind, Path(source), Path(out), lambda line: print(line, file=progress, flush=True))


if __name__ == "__main__":
    socket.setdefaulttimeout(NETWORK_SECONDS)
    main(*sys.argv[1:])
