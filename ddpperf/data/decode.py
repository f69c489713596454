"""Decode a folder of images, or CIFAR-10, into one file of tensors.

    python -m ddpperf.data.decode imagefolder|cifar10 FOLDER OUT

ddpperf/data/cache.py runs this module as a child process, because the process that runs the tests
imports no torch. Without a FOLDER, CIFAR-10 is downloaded. torch.load reads the file OUT/images.pt,
which holds train_images uint8 [N, 3, H, W] (RGB), train_labels int64 [N], test_images and
test_labels. OUT/data.json describes them. Lines about progress go to standard output. Images that
cannot be decoded end the process with one sentence.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import sys
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS, has_file_allowed_extension
from torchvision.transforms.functional import pil_to_tensor

from ddpperf.data.cache import FORMS
from ddpperf.errors import Refused, first_line
from ddpperf.io.files import open_regular
from ddpperf.results.units import counted

SYSTEM_FILES = ("Thumbs.db", "desktop.ini")  # of file managers, which nobody sees
SEEN_IMAGES, LEAST_SPREAD = 1024, 1.0  # standard deviation of the pixels of so many images, of 255
REPORTED_IMAGES = 10_000  # decoded between two lines of progress
THREADS = 8  # more would wait for the interpreter's lock
NETWORK_SECONDS = 30.0
# Pillow chooses a format by a file's content, and some formats start programs: EPS starts Ghostscript.
FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

say = partial(print, flush=True)


def load(path: str) -> Image.Image:
    """Return an image file as an RGB image with 8 bits per colour, or raise Refused."""
    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            return (_of_8_bits(image) if image.mode[0] in "IF" else image).convert("RGB")
    except Exception as error:  # Pillow raises most kinds for damaged files
        why = f"as {', '.join(FORMATS)} ({first_line(error)})"
        raise Refused(f"{path} cannot be decoded {why}; repair or remove it") from error


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits with the upper 8 bits of each pixel; convert() would clip it at 255."""
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError("its pixels are no whole numbers from 0 to 65535")
    return Image.fromarray((pixels // 256).astype(np.uint8))


class Files:
    """Says which files of a folder are images, by name or else by content, and keeps the others."""

    def __init__(self) -> None:
        self.others: list[str] = []

    def is_image(self, path: str) -> bool:
        name = Path(path).name
        if name.startswith(".") or name in SYSTEM_FILES:
            return False
        if has_file_allowed_extension(path, IMG_EXTENSIONS):
            return True
        try:
            with open_regular(path) as file, Image.open(file, formats=FORMATS):
                return True
        except Exception:  # Pillow raises most kinds
            self.others.append(path)
            return False

    def require_images(self, folder: Path) -> None:
        """Raise Refused if the folder had other files."""
        if self.others:
            what = (
                f"{counted(len(self.others), 'file')} in {folder} cannot be decoded as {', '.join(FORMATS)}"
            )
            raise Refused(f"{what}, such as {self.others[0]}; repair or remove them")


def data_sets(kind: str, folder: Path, *, download: bool) -> list[Any]:
    """Return torchvision's data sets of training and of test images, or raise Refused."""
    files = Files()
    try:
        if kind == "cifar10":
            get = partial(CIFAR10, str(folder), transform=pil_to_tensor)
            return [get(train=True, download=download), get(train=False)]
        parts = [
            ImageFolder(str(folder / part), pil_to_tensor, loader=load, is_valid_file=files.is_image)
            for part in ("train", "test")
        ]
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        files.require_images(folder)
        what = "downloaded" if download else f"read from {folder}"
        raise Refused(f"{kind} cannot be {what} ({first_line(error)}); pass {FORMS}") from error
    files.require_images(folder)
    if others := sorted(set(parts[0].classes) ^ set(parts[1].classes)):
        raise Refused(f"{folder} must have the same classes in train and test; only one has {others[0]!r}")
    return parts


def decode(parts: list[Any]) -> dict[str, Tensor]:
    """Return the images and labels of both data sets by their names in the file, or raise Refused.

    Both are in a fixed random order, so that the first images have all classes.
    """
    found = {}
    shape = parts[0][0][0].shape
    for name, part in zip(("train", "test"), parts, strict=True):
        order = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))
        images = torch.empty((len(part), *shape), dtype=torch.uint8)
        with ThreadPool(THREADS) as threads:
            decoded = threads.imap(part.__getitem__, order.tolist(), chunksize=32)
            for place, (pixels, _) in enumerate(decoded):
                if pixels.shape != shape:
                    path, _ = part.samples[order[place]]
                    size, other_size = (f"{width}x{height}" for _, height, width in (pixels.shape, shape))
                    what = f"{path} has {size} pixels and others have {other_size}"
                    raise Refused(f"all images must have one size, but {what}; resize it, or leave it out")
                images[place] = pixels
                if (place + 1) % REPORTED_IMAGES == 0:
                    say(f"decoded {place + 1:,} of {len(part):,} {name} images")
        if images[:SEEN_IMAGES].float().std() < LEAST_SPREAD:
            what = f"the pixels of the {name} images have almost one value ({images[0, 0, 0, 0]} of 255)"
            raise Refused(f"{what}; check that their files use all bits of a pixel")
        found[f"{name}_images"], found[f"{name}_labels"] = images, torch.tensor(part.targets)[order]
    return found


def save(decoded: dict[str, Tensor], path: Path) -> dict[str, object]:
    """Write images and labels to the file `path` and return their number, size in pixels and digest.

    The digest is 12 hex digits of a sha256. Raises OSError or RuntimeError if the disk is full.
    """
    torch.save(decoded, path)
    digest = hashlib.sha256()
    for name in ("train_images", "test_images", "train_labels", "test_labels"):
        digest.update(f"{list(decoded[name].shape)}".encode())
        digest.update(decoded[name].flatten().numpy().data)
    return {
        "digest": digest.hexdigest()[:12],
        "train_images": len(decoded["train_labels"]),
        "test_images": len(decoded["test_labels"]),
        "image_size": list(decoded["train_images"].shape[2:]),
    }


def main(kind: str, folder: str, out: str) -> None:
    socket.setdefaulttimeout(NETWORK_SECONDS)
    try:
        say(f"{'decoding' if folder else 'downloading'} the images of {folder or 'CIFAR-10'}, once")
        parts = data_sets(kind, Path(folder or f"{out}/cifar10"), download=not folder)
        data = {"classes": len(parts[0].classes), **save(decode(parts), Path(out, "images.pt"))}
        Path(out, "data.json").write_text(json.dumps(data), encoding="utf-8")
    except Refused as refusal:
        sys.exit(str(refusal))
    except (OSError, RuntimeError) as error:
        sys.exit(f"{Path(out).parent} cannot hold them ({first_line(error)}); make room there")


if __name__ == "__main__":
    main(*sys.argv[1:])
