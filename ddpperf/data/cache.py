"""Decode the images that --data names, once and in a child process, into a file with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused
from ddpperf.io.files import open_regular, read_text
from ddpperf.io.private_folders import PrivateFolder
from ddpperf.machine.child_process import describe_status, package_path, run_child

FORMAT = 2  # of the cached file; change it together with what ddpperf.data.decode stores
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

    folder: the cache. say: called with each line of progress. Raises Refused for images that cannot
    be decoded.
    """
    if text == "synthetic":
        return Data()
    kind, _, where = text.partition(":")
    if kind not in PARTS or not (where or text == "cifar10"):
        raise Refused(f"--data must be {FORMS}, got {text!r}; pass one of them")
    # A shell does not expand ~ after a colon.
    source = Path(os.path.realpath(os.path.expanduser(where))) if where else None
    name = hashlib.sha256(str(source).encode()).hexdigest()[:16]
    path = Path(os.path.realpath(folder), f"{kind}-{name}.pt")
    key = _key(kind, source)
    try:
        about = json.loads(read_text(path.with_suffix(".json")))
        is_whole = about["key"] == key and about["sha256"] == _sha256(path)
    except (OSError, ValueError, KeyError):
        is_whole = False
    if not is_whole:
        about = _decode(kind, source, key, path, say)
    about["data"]["image_size"] = tuple(about["data"]["image_size"])
    return Data(name=kind, path=path, **about["data"])


def _key(kind: str, source: Path | None) -> str:
    """Return a hash of the names, sizes and times of the image files in a folder."""
    files = []
    try:
        for part in PARTS[kind] if source is not None else ():
            for folder, _, names in os.walk(f"{source}/{part}", onerror=_raise, followlinks=True):
                for path in (os.path.join(folder, name) for name in names):
                    with contextlib.suppress(FileNotFoundError):  # a link to nowhere
                        status = os.stat(path)
                        files.append((path, status.st_size, status.st_mtime_ns))
    except OSError as error:
        why = f"{error.filename} cannot be read ({error.strerror})"
        raise Refused(f"--data {kind}:{source} cannot be used, because {why}; pass {FORMS}") from error
    return hashlib.sha256(repr((FORMAT, sorted(files))).encode()).hexdigest()


def _raise(error: OSError) -> None:
    raise error


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _decode(
    kind: str, source: Path | None, key: str, path: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Decode images in a child process into the file `path`, and return the content of its JSON sidecar."""
    if importlib.util.find_spec("torchvision") is None:
        advice = "install it, or leave --data out"
        raise Refused(f"--data {kind} needs torchvision, which is not installed; {advice}")
    what = f"the images of {source or 'CIFAR-10'} were not decoded"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with PrivateFolder(str(path.parent)) as out:
            command = [sys.executable, "-P", "-m", "ddpperf.data.decode", kind, str(source or ""), str(out)]
            finished = run_child(command, {"PYTHONPATH": package_path()}, SILENT_SECONDS, on_line=say)
            if finished.returncode:
                last = finished.stderr.strip().split("\n")[-1].strip()
                raise Refused(f"{what}: {last or 'the process ' + describe_status(finished.returncode)}")
            data = json.loads(read_text(out / "data.json"))
            about = {"data": data, "key": key, "sha256": _sha256(out / "images.pt")}
            (out / "data.json").write_text(json.dumps(about), encoding="utf-8")
            os.replace(out / "images.pt", path)
            os.replace(out / "data.json", path.with_suffix(".json"))
    except subprocess.TimeoutExpired as error:
        raise Refused(f"{what} within {SILENT_SECONDS} s; check the disk, or name another folder") from error
    except OSError as error:
        why = f"({error.strerror}); make it writable"
        raise Refused(f"decoded images cannot be stored in {path.parent} {why}") from error
    return about
