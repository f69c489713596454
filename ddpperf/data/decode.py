"""Decode a folder of images, or CIFAR-10, into one file of tensors.

    python -m ddpperf.data.decode imagefolder|cifar10 FOLDER OUT

ddpperf/data/cache.py runs this module as a child process, because the process that runs the tests
imports no torch. Without a FOLDER, CIFAR-10 is downloaded. torch.load reads the file OUT/images.pt.
It holds train_images uint8 [N, 3, H, W] (RGB), train_labels int64 [N], test_images, test_labels,
and classes, the class names in the order of the labels. OUT/data.json holds the summary that `save`
returns. Lines about progress go to standard output. Images that cannot be decoded end the process
with one sentence.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import sys
import time
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder

from ddpperf.errors import Refused, first_line
from ddpperf.io.files import open_regular

PROGRESS_SECONDS = 5.0
MAX_THREADS = 8  # more would wait for the interpreter's lock
NETWORK_SECONDS = 30.0
# Pillow chooses a format by a file's content, and some formats start programs: EPS starts Ghostscript.
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

say = partial(print, flush=True)


def image_folders(folder: Path) -> tuple[ImageFolder, ImageFolder]:
    """Return the data sets folder/train/<class> and folder/test/<class>, or raise Refused."""
    try:
        train, test = (ImageFolder(str(folder / part)) for part in ("train", "test"))
    except OSError as error:
        found = str(error).removesuffix(".").replace(". Supported", ", supported")
        needed = "must have images of every class in train/<class> and test/<class>"
        raise Refused(f"{folder} {needed}: {found}") from error
    if different := sorted(set(train.classes) ^ set(test.classes)):
        name = different[0]
        where = "train and not in test" if name in train.classes else "test and not in train"
        raise Refused(f"{folder} has the class {name!r} in {where}; both must have all classes")
    return train, test


def pixels_of(folders: tuple[ImageFolder, ImageFolder]) -> list[Tensor]:
    """Return the shuffled images of both data sets, each uint8 [N, 3, H, W], or raise Refused."""
    first = folders[0].samples[0][0]
    height, width, _ = load(first).shape
    images = [torch.empty((len(folder), 3, height, width), dtype=torch.uint8) for folder in folders]
    paths = [path for folder in folders for path, _ in folder.samples]
    places = [part[place] for part in images for place in shuffled(len(part)).argsort()]
    reported = time.monotonic()
    with ThreadPool(min(len(os.sched_getaffinity(0)), MAX_THREADS)) as threads:
        for done, pixels in enumerate(threads.imap(load, paths, chunksize=32)):
            if pixels.shape != (height, width, 3):
                found = f"{pixels.shape[1]}x{pixels.shape[0]}"
                sizes = f"{first} has {width}x{height} pixels and {paths[done]} has {found}"
                raise Refused(f"all images must have one size, but {sizes}; resize them, or leave one out")
            places[done].copy_(torch.from_numpy(pixels).permute(2, 0, 1))
            if time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                say(f"decoded {done + 1:,} of {len(paths):,} images")
    return images


def load(path: str) -> Any:
    """Return an image file's pixels as numpy uint8 [H, W, 3] (RGB), or raise Refused."""
    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            return numpy.array(image.convert("RGB"))
    except UnidentifiedImageError:
        why = f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image"
    except Exception as error:  # Pillow raises most kinds for damaged files
        why = getattr(error, "strerror", None) or first_line(error) or type(error).__name__
    raise Refused(f"{path} cannot be decoded ({why}); repair or remove it")


def cifar10(root: Path, *, download: bool) -> tuple[CIFAR10, CIFAR10]:
    """Return CIFAR-10's training and test images in a folder, or raise Refused."""
    try:
        return CIFAR10(str(root), download=download), CIFAR10(str(root), train=False)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        why = first_line(error).removesuffix(".")
        needed = "CIFAR-10's six batches and batches.meta as published"
        if not download:
            raise Refused(f"{root} must have {needed}, but one is missing or damaged ({why})") from error
        instead = f"pass cifar10:DIR with {needed}, or imagefolder:DIR"
        raise Refused(f"CIFAR-10 cannot be downloaded ({why}); {instead}") from error


def shuffled(count: int) -> Tensor:
    """Return a fixed random order of `count` images, so that the first images have all classes."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def decode(kind: str, folder: str, out: Path) -> dict[str, Any]:
    """Return the shuffled images and labels of both data sets by their names in the file."""
    parts: tuple[Any, Any]
    if kind == "imagefolder":
        parts = image_folders(Path(folder))
        say(f"decoding {sum(map(len, parts)):,} images of {folder}, once")
        images = pixels_of(parts)
    else:
        say(f"{'decoding' if folder else 'downloading'} CIFAR-10, once")
        parts = cifar10(Path(folder) if folder else out / "cifar10", download=not folder)
        images = [torch.from_numpy(part.data[shuffled(len(part))]).permute(0, 3, 1, 2) for part in parts]
    found: dict[str, Any] = {"classes": list(parts[0].classes)}
    for name, part, pixels in zip(("train", "test"), parts, images, strict=True):
        found[f"{name}_images"] = pixels.contiguous()
        found[f"{name}_labels"] = torch.tensor(part.targets)[shuffled(len(part))]
    return found


def save(decoded: dict[str, Any], path: Path) -> dict[str, object]:
    """Write decoded images and labels to the file `path` and return a summary of them.

    digest: 12 hex digits of a sha256 over images and labels. classes: the number of classes.
    image_size: height and width in pixels. Raises OSError if the disk is full.
    """
    ordered = [decoded[f"{part}_{name}"] for name in ("images", "labels") for part in ("train", "test")]
    with open(path, "wb") as file:
        # torch.save would hide why it fails on a full disk
        os.posix_fallocate(file.fileno(), 0, 10_000 + sum(tensor.nbytes for tensor in ordered))
        torch.save(decoded, file)
        file.truncate()
    digest = hashlib.sha256()
    for tensor in ordered:
        digest.update(f"{list(tensor.shape)}".encode())
        digest.update(tensor.flatten().numpy().data)
    return {
        "digest": digest.hexdigest()[:12],
        "train_images": len(decoded["train_labels"]),
        "test_images": len(decoded["test_labels"]),
        "classes": len(decoded["classes"]),
        "image_size": list(decoded["train_images"].shape[2:]),
    }


def main(kind: str, folder: str, out: str) -> None:
    socket.setdefaulttimeout(NETWORK_SECONDS)
    try:
        data = save(decode(kind, folder, Path(out)), Path(out, "images.pt"))
        Path(out, "data.json").write_text(json.dumps(data), encoding="utf-8")
    except Refused as refusal:
        sys.exit(str(refusal))
    except OSError as error:
        sys.exit(f"{Path(out).parent} cannot hold them ({error.strerror}); make room there")


if __name__ == "__main__":
    main(*sys.argv[1:])
