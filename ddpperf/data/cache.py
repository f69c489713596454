"""The images to train on: real ones are decoded once, by a process of its own, and kept as one checked file of tensors."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddpperf
from ddpperf.errors import Refused
from ddpperf.machine.child_process import describe_exit

FORM = 1  # of the cached file; another number when ddpperf.data.decode stores anything else, so that older files are not read
SYNTHETIC_IMAGES = 50_000  # CIFAR-10's training images
SYNTHETIC_TEST_IMAGES = 1024
KEY_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images to train on. name: synthetic, cifar10 or imagefolder.

    path: the cached tensors that ddpperf.data.decode describes, None for synthetic images. digest: the first 12 hex digits of the
    sha256 of the images and labels themselves, the same on every machine; "" for synthetic images. image_size:
    height and width.
    """

    name: str
    path: Path | None
    digest: str
    train_images: int
    test_images: int = 0
    classes: int = 10
    image_size: tuple[int, int] = (32, 32)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where images come from. name: Data's. kind: what ddpperf.data.decode calls it. parts: the folders that it reads."""

    name: str
    kind: str
    folder: Path
    parts: tuple[str, ...]


def prepare(text: str, folder: Path, say: Callable[[str], None]) -> Data:
    """The images that `--data text` means, from the cache in `folder` or decoded anew, of which `say` gets lines.

    Raises Refused with one sentence for images that cannot be had.
    """
    folder = Path(os.path.realpath(folder))
    source = _read_option(text, folder)
    if source is None:
        return Data(
            name="synthetic",
            path=None,
            digest="",
            train_images=SYNTHETIC_IMAGES,
            test_images=SYNTHETIC_TEST_IMAGES,
        )
    path = folder / f"{source.name}-{_key(source)}.pt"
    cached = _cached(source, path)
    if cached is not None:
        return cached
    if os.path.exists(path) or os.path.exists(_sidecar(path)):
        say(f"the cache {path} is damaged, rebuilding it")
    return _decode(source, path, say)


def _read_option(text: str, folder: Path) -> _Source | None:
    """The source that the option names, None for synthetic images; raises Refused."""
    name, colon, where = text.partition(":")
    if text == "synthetic":
        return None
    if (
        text == "cifar10"
    ):  # torchvision knows the checksums of its files, so nothing need be read to know them unchanged
        return _Source(name="cifar10", kind="download", folder=folder / "cifar10", parts=())
    if name not in ("cifar10", "imagefolder") or (colon and not where):
        raise Refused(
            f"--data must be synthetic, cifar10[:DIR] or imagefolder:DIR, got {text!r}; pass one of them"
        )
    if not where:
        raise Refused(
            "--data imagefolder needs a folder; pass imagefolder:DIR with DIR/train/<class>/* and DIR/test"
        )
    given = Path(
        os.path.realpath(os.path.expanduser(where))
    )  # a shell leaves the ~ in name:~/folder as it is
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
    """Hex digits that change with the cache's form, the source's place, and any file's name, size or time."""
    try:
        files = sorted(file for part in source.parts for file in _listing(str(source.folder / part)))
    except OSError as error:
        raise Refused(f"{error.filename} cannot be read ({error.strerror}); make it readable") from error
    listing = repr((FORM, source.kind, str(source.folder), files))
    return hashlib.sha256(listing.encode()).hexdigest()[:KEY_DIGITS]


def _listing(folder: str) -> Iterator[tuple[str, int, int]]:
    """Path, bytes and time in ns of every file below a folder, links followed as ImageFolder does; raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _listing(entry.path)
            else:
                with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere is not there
                    status = entry.stat()
                    yield entry.path, status.st_size, status.st_mtime_ns


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def _cached(source: _Source, path: Path) -> Data | None:
    """What is in the cache at `path`, None unless it is whole."""
    try:
        about = json.loads(_sidecar(path).read_text())
        if about["sha256"] != _sha256(path):
            return None
        return _data(source, path, about)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _data(source: _Source, path: Path, about: dict[str, Any]) -> Data:
    height, width = about["image_size"]
    return Data(
        name=source.name,
        path=path,
        digest=str(about["digest"]),
        train_images=int(about["train_images"]),
        test_images=int(about["test_images"]),
        classes=int(about["classes"]),
        image_size=(int(height), int(width)),
    )


def _decode(source: _Source, path: Path, say: Callable[[str], None]) -> Data:
    """Decode into a new folder beside `path`, and put it and its sidecar into place; raises Refused."""
    if importlib.util.find_spec("torchvision") is None:
        raise Refused(
            f"--data {source.name} needs torchvision, which is not installed; install it, or leave --data out"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(
                prefix="decoding-", dir=path.parent, ignore_cleanup_errors=True
            ) as name,
            _decoder(source, out := Path(name)) as decoder,
        ):
            about = _answer(decoder, source, out, say)
            about |= {"source": _text(source), "sha256": _sha256(out / "images.pt")}
            (out / "sidecar").write_text(json.dumps(about))
            os.replace(out / "images.pt", path)
            os.replace(out / "sidecar", _sidecar(path))
    except OSError as error:
        raise Refused(
            f"decoded images cannot be kept in {path.parent} ({error.strerror}); see to it that it can be written"
        ) from error
    _remove_older(source, path)
    return _data(source, path, about)


def _text(source: _Source) -> str:
    return f"{source.kind}:{source.folder}"


@contextlib.contextmanager
def _decoder(source: _Source, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of ddpperf.data.decode that writes out/images.pt, and out/errors; killed at the end.

    When this process dies before that, it ends by itself and takes `out` away.
    """
    package_parent = str(Path(ddpperf.__file__).parents[1])
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH")))),
        "TORCHINDUCTOR_CACHE_DIR": str(
            out / "inductor"
        ),  # importing torchvision makes this folder, and leaves it
    }
    with (
        open(out / "errors", "wb") as errors,
        subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "ddpperf.data.decode",
                source.kind,
                str(source.folder),
                str(out),
            ],  # -P: not what lies here
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | variables,
            process_group=0,  # its own: Ctrl-C reaches the controller alone
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _answer(
    decoder: subprocess.Popen[bytes], source: _Source, out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """What a decoder says of the file that it wrote, in the end; raises Refused."""
    assert decoder.stdout is not None
    for line in decoder.stdout:
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        if "done" in answer:
            about: dict[str, Any] = answer["done"]
            return about
        say(answer["say"])
    ended = describe_exit(decoder)
    lines = [
        line.strip() for line in (out / "errors").read_text(errors="replace").split("\n") if line.strip()
    ]
    why = f" ({lines[-1]})" if lines else ""
    raise Refused(f"the images of {source.folder} were not decoded: the process {ended}{why}")


def _remove_older(source: _Source, path: Path) -> None:
    """Remove what was cached of the source when it had other files, or by a ddpperf with another form."""
    for sidecar in path.parent.glob(f"{source.name}-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if sidecar != _sidecar(path) and json.loads(sidecar.read_text())["source"] == _text(source):
                sidecar.with_suffix(".pt").unlink(missing_ok=True)
                sidecar.unlink()
