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

import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from ddpperf.errors import Refused, first_line
from ddpperf.io.files import open_regular

PROGRESS_SECONDS = 5.0
MAX_THREADS = 8  # more would wait for the interpreter's lock
NETWORK_SECONDS = 30.0
# Pillow chooses a format by a file's content, and some formats start programs: EPS starts Ghostscript.
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

say = partial(print, flush=True)


def image_folders(root: Path) -> list[ImageFolder]:
    """Return the data sets root/train/<class> and root/test/<class>, or raise Refused."""
    try:
        parts = [ImageFolder(str(root / part)) for part in ("train", "test")]
    except OSError as error:
        needed = "must have images of every class in train/<class> and test/<class>"
        raise Refused(f"{root} {needed}: {first_line(error)}") from error
    if others := sorted(set(parts[0].classes) ^ set(parts[1].classes)):
        raise Refused(f"{root} must have the same classes in train and test; only one has {others[0]!r}")
    return parts


def cifar10(root: Path, *, download: bool) -> list[CIFAR10]:
    """Return CIFAR-10's training and test images in a folder, or raise Refused."""
    try:
        return [CIFAR10(str(root), train=train, download=download and train) for train in (True, False)]
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        needed = "cifar10:DIR with its six batches and batches.meta as published, or imagefolder:DIR"
        what = "downloaded" if download else f"read from {root}"
        raise Refused(f"CIFAR-10 cannot be {what} ({first_line(error)}); pass {needed}") from error


def shuffled(count: int) -> Tensor:
    """Return a fixed random order of `count` images, so that the first images have all classes."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def pixels_of(paths: list[str], like: str) -> Tensor:
    """Return the images of files, uint8 [N, 3, H, W], or raise Refused.

    like: an image file whose size all images must have.
    """
    shape = load(like).shape
    images = torch.empty((len(paths), *shape), dtype=torch.uint8)
    reported = time.monotonic()
    with ThreadPool(min(len(os.sched_getaffinity(0)), MAX_THREADS)) as threads:
        for place, pixels in enumerate(threads.imap(load, paths, chunksize=32)):
            if pixels.shape != shape:
                (_, height, width), (_, other_height, other_width) = shape, pixels.shape
                found = f"{like} has {width}x{height} pixels and {paths[place]} {other_width}x{other_height}"
                raise Refused(f"all images must have one size, but {found}; resize them, or leave one out")
            images[place] = pixels
            if time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                say(f"decoded {place + 1:,} of {len(paths):,} images")
    return images


def load(path: str) -> Tensor:
    """Return an image file's pixels as uint8 [3, H, W] (RGB), or raise Refused."""
    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            pixels: Tensor = pil_to_tensor(image.convert("RGB"))
            return pixels
    except Exception as error:  # Pillow raises most kinds for damaged files
        why = f"as {', '.join(FORMATS)} ({first_line(error)})"
        raise Refused(f"{path} cannot be decoded {why}; repair or remove it") from error


def decode(kind: str, folder: str, out: Path) -> dict[str, Any]:
    """Return the shuffled images and labels of both data sets by their names in the file."""
    parts: list[Any]
    if kind == "imagefolder":
        parts = image_folders(Path(folder))
        say(f"decoding {sum(map(len, parts)):,} images of {folder}, once")
    else:
        say(f"{'decoding' if folder else 'downloading'} CIFAR-10, once")
        parts = cifar10(Path(folder) if folder else out / "cifar10", download=not folder)
    found: dict[str, Any] = {"classes": list(parts[0].classes)}
    for name, part in zip(("train", "test"), parts, strict=True):
        order = shuffled(len(part))
        if kind == "imagefolder":
            first, _ = parts[0].samples[0]
            found[f"{name}_images"] = pixels_of([part.samples[index][0] for index in order], like=first)
        else:
            found[f"{name}_images"] = torch.from_numpy(part.data[order]).permute(0, 3, 1, 2).contiguous()
        found[f"{name}_labels"] = torch.tensor(part.targets)[order]
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
