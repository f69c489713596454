"""Decode the images that --data names, once and in a child process, into a file with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused
from ddpperf.io.files import open_regular, read_text
from ddpperf.io.private_folders import PrivateFolder
from ddpperf.machine.child_process import describe_status, package_path, run_child

FORMAT = 1  # of the cached file; change it together with what ddpperf.data.decode stores
SILENT_SECONDS = 7200  # a download reports nothing until its end
# Raised for a damaged sidecar:
UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


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


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A folder of images that the option --data names.

    kind: the first argument of ddpperf.data.decode. parts: the subfolders that hold images.
    """

    name: str
    kind: str
    folder: Path
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{self.folder}"


def prepare(text: str, folder: Path, say: Callable[[str], None]) -> Data:
    """Return the images that a value of --data names, decoding them if they are not in the cache.

    folder: the cache. say: called with each line of progress. Raises Refused for images that cannot
    be decoded.
    """
    folder = Path(os.path.realpath(folder))
    source = _read_option(text, folder)
    if source is None:
        return Data()
    path = folder / f"{source.name}-{_key(source)}.pt"
    with contextlib.suppress(*UNREADABLE):
        about = json.loads(read_text(path.with_suffix(".json")))
        if about["sha256"] == _sha256(path):
            return _data(source, path, about)
    if os.path.exists(path) or os.path.exists(path.with_suffix(".json")):
        say(f"the cache {path} is damaged, rebuilding it")
    return _decode(source, path, say)


def _read_option(text: str, folder: Path) -> _Source | None:
    name, colon, where = text.partition(":")
    if text == "synthetic":
        return None
    if text == "cifar10":  # the key needs none of its files: torchvision knows their checksums
        return _Source(name="cifar10", kind="download", folder=folder / "cifar10", parts=())
    if name not in ("cifar10", "imagefolder") or (colon and not where):
        known = "synthetic, cifar10[:DIR] or imagefolder:DIR"
        raise Refused(f"--data must be {known}, got {text!r}; pass one of them")
    if not where:
        example = "imagefolder:DIR with DIR/train/<class>/* and DIR/test"
        raise Refused(f"--data imagefolder needs a folder; pass {example}")
    given = Path(os.path.realpath(os.path.expanduser(where)))  # a shell does not expand ~ after a colon
    if not os.path.isdir(given):
        found = "is no folder" if os.path.exists(given) else "does not exist"
        raise Refused(f"--data {name} needs a folder, but {given} {found}; pass {name}:DIR")
    parts = ("train", "test") if name == "imagefolder" else ("cifar-10-batches-py",)
    for part in parts:
        if not os.path.isdir(given / part):
            needed = "DIR/train/<class>/* and DIR/test/<class>/*" if name == "imagefolder" else f"DIR/{part}"
            raise Refused(f"--data {name}:DIR needs {needed}, but {given} has no folder {part}; add it")
    return _Source(name=name, kind=name, folder=given, parts=parts)


def _key(source: _Source) -> str:
    """Return a hash of a folder's path and of the names, sizes and times of its image files."""
    try:
        files = sorted(file for part in source.parts for file in _files(str(source.folder / part)))
    except OSError as error:
        raise Refused(f"{error.filename} cannot be read ({error.strerror}); make it readable") from error
    listing = repr((FORMAT, source.kind, str(source.folder), files))
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    """Yield the path, size in bytes and change time in ns of each file below a folder.

    Symbolic links are followed.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(entry.path)
            else:
                with contextlib.suppress(FileNotFoundError):  # a link to nowhere
                    status = entry.stat()
                    yield entry.path, status.st_size, status.st_mtime_ns


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _data(source: _Source, path: Path, about: dict[str, Any]) -> Data:
    height, width = about["image_size"]
    counts = {name: int(about[name]) for name in ("train_images", "test_images", "classes")}
    size = int(height), int(width)
    if min(*counts.values(), *size) < 1:
        raise ValueError("each count of images, classes and pixels is at least 1")
    return Data(name=source.name, path=path, digest=str(about["digest"]), image_size=size, **counts)


def _decode(source: _Source, path: Path, say: Callable[[str], None]) -> Data:
    if importlib.util.find_spec("torchvision") is None:
        advice = "install it, or leave --data out"
        raise Refused(f"--data {source.name} needs torchvision, which is not installed; {advice}")
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with PrivateFolder(str(folder)) as out:
            about = _run_decoder(source, out, say)
            about |= {"source": str(source), "sha256": _sha256(out / "images.pt")}
            (out / "sidecar").write_text(json.dumps(about), encoding="utf-8")
            os.replace(out / "images.pt", path)
            os.replace(out / "sidecar", path.with_suffix(".json"))
    except OSError as error:
        why = f"({error.strerror}); make it writable"
        raise Refused(f"decoded images cannot be stored in {folder} {why}") from error
    for sidecar in folder.glob(f"{source.name}-*.json"):  # of earlier contents of the same image folder
        with contextlib.suppress(*UNREADABLE):
            if sidecar.stem != path.stem and json.loads(read_text(sidecar))["source"] == str(source):
                sidecar.with_suffix(".pt").unlink(missing_ok=True)
                sidecar.unlink()
    return _data(source, path, about)


def _run_decoder(source: _Source, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Decode images in a child process into out/images.pt, and return a summary of them."""
    command = [sys.executable, "-P", "-m", "ddpperf.data.decode", source.kind, str(source.folder), str(out)]
    try:
        finished = run_child(command, {"PYTHONPATH": package_path()}, SILENT_SECONDS, on_line=say)
    except subprocess.TimeoutExpired as error:
        what = f"decoding the images of {source.folder} made no progress for {SILENT_SECONDS} s"
        raise Refused(f"{what}; check the disk, or name another folder") from error
    try:
        result: dict[str, Any] = json.loads((out / "result.json").read_bytes())
    except (FileNotFoundError, ValueError):
        last = finished.stderr.strip().split("\n")[-1].strip()
        why = f" ({last})" if last else ""
        ended = describe_status(finished.returncode)
        raise Refused(f"the images of {source.folder} were not decoded: the process {ended}{why}") from None
    if "refused" in result:
        raise Refused(result["refused"])
    return result
