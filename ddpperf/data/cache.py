"""Decode the images that --data names, once and in a child process, into a file of tensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused, first_line
from ddpperf.io.files import read_text
from ddpperf.io.private_folders import PrivateFolder
from ddpperf.machine.child_process import describe_status, package_path, run_child

FORMAT = 4  # of the cached file; change it together with what ddpperf.data.decode stores
SILENT_SECONDS = 7200  # a download reports nothing until its end
PARTS = {"imagefolder": ("train", "test"), "cifar10": ("cifar-10-batches-py",)}  # subfolders with images
FORMS = "synthetic, cifar10[:DIR] or imagefolder:DIR with DIR/train/<class>/* and DIR/test/<class>/*"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Describes the images that models are trained on, which are synthetic by default.

    name: synthetic, cifar10 or imagefolder. path: the file of tensors, or None for synthetic
    images. digest: the first 12 hex digits of a sha256 over images and labels, or "" for synthetic
    images. image_size: height and width in pixels.
    """

    name: str = "synthetic"
    path: Path | None = None
    digest: str = ""
    train_images: int = 50_000  # as many as CIFAR-10 has
    test_images: int = 1024
    classes: int = 10
    image_size: tuple[int, int] = (32, 32)


def prepare(text: str, folder: Path, say: Callable[[str], None]) -> Data:
    """Return the images that a value of --data names, decoding them if they are not in the cache.

    folder: the cache. A JSON file beside each file of tensors has its size, and a key that changes
    with the images. say: called with each line of progress. Raises Refused for images that cannot
    be decoded.
    """
    if text == "synthetic":
        return Data()
    kind, _, where = text.partition(":")
    if kind not in PARTS or not (where or text == "cifar10"):
        raise Refused(f"--data must be {FORMS}, got {text!r}; pass one of them")
    # A shell does not expand ~ after a colon.
    source = os.path.realpath(os.path.expanduser(where)) if where else ""
    key = _key(kind, source)
    name = hashlib.sha256(source.encode()).hexdigest()[:16]
    path = Path(os.path.realpath(folder), f"{kind}-{name}.pt")
    try:
        about = json.loads(read_text(path.with_suffix(".json")))
        is_whole = (about["key"], about["bytes"]) == (key, path.stat().st_size)
    except (OSError, ValueError, KeyError):
        is_whole = False
    if not is_whole:
        about = _decode(kind, source, key, path, say)
    height, width = about["data"]["image_size"]
    return Data(**about["data"] | {"name": kind, "path": path, "image_size": (height, width)})


def _key(kind: str, source: str) -> str:
    """Return a hash of the names, sizes and times of the image files in a folder."""
    files = []
    for part in PARTS[kind] if source else ():
        for folder, _, names in os.walk(f"{source}/{part}", followlinks=True):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):  # decoding refuses what cannot be read
                    status = os.stat(path)
                    files.append((path, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr((FORMAT, sorted(files))).encode()).hexdigest()


def _decode(kind: str, source: str, key: str, path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Decode images in a child process into the file `path`, and return the content of its JSON file."""
    what = f"the images of {source or 'CIFAR-10'} were not decoded"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with PrivateFolder(str(path.parent)) as out:
            command = [sys.executable, "-P", "-m", "ddpperf.data.decode", kind, source, str(out)]
            finished = run_child(command, {"PYTHONPATH": package_path()}, SILENT_SECONDS, on_line=say)
            if finished.returncode:
                last = finished.stderr.strip().split("\n")[-1].strip()
                raise Refused(f"{what}: {last or 'the process ' + describe_status(finished.returncode)}")
            images, data = out / "images.pt", out / "data.json"
            about = {"data": json.loads(read_text(data)), "key": key, "bytes": images.stat().st_size}
            data.write_text(json.dumps(about), encoding="utf-8")
            os.replace(images, path)
            os.replace(data, path.with_suffix(".json"))
    except (subprocess.TimeoutExpired, OSError) as error:
        advice = f"make {path.parent} writable and free space there"
        raise Refused(f"{what} ({first_line(error)}); {advice}") from error
    return about
