"""The cache of decoded images: read only if it is whole, refusals in one sentence. No process is
started.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ddpperf.data import cache as cache_module
from ddpperf.data import decode
from ddpperf.data.cache import Data, prepare
from ddpperf.errors import Refused
from ddpperf.io.private_folders import PREFIX, PrivateFolder, remove_abandoned_folders
from tests.images import images_in, picture, silent
from tests.project import full_disk


@pytest.fixture(autouse=True)
def _decode_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in this process instead of a child, which would have to import torch."""

    def run(
        command: Sequence[str], variables: Mapping[str, str], seconds: float, on_line: Callable[[str], None]
    ) -> CompletedProcess[str]:
        kind, source, out = command[-3:]
        decode.write_result(kind, Path(source), Path(out), on_line)
        return CompletedProcess([], 0, "", "")

    monkeypatch.setattr(cache_module, "run_child", run)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images_in(tmp_path_factory.mktemp("images"))


@pytest.fixture
def cache(images: Path, tmp_path: Path) -> Path:
    """The file of decoded images, alone with its sidecar in a folder."""
    path = prepare(f"imagefolder:{images}", tmp_path / "caches", silent).path
    assert path is not None
    return path


@pytest.fixture
def no_torchvision(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be decoded, so that all images come from the cache."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


def test_synthetic_images_need_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert prepare("synthetic", folder, silent) == Data(
        name="synthetic", path=None, digest="", train_images=50_000, test_images=1024
    )
    assert not folder.exists()


OLDER = {  # files in a folder of caches, and whether they stay when the folder's images have changed
    "imagefolder-0": ("imagefolder:{images}", False),
    "imagefolder-1": ("imagefolder:/elsewhere", True),
    "cifar10-2": ("imagefolder:{images}", True),
}


def test_decoded_images_are_a_file_and_a_sidecar(images: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data = prepare(f"imagefolder:{images}", tmp_path, said.append)
    assert said == [f"decoding 27 images of {images}, once"]
    assert data.path is not None
    assert (data.name, data.train_images, len(data.digest)) == ("imagefolder", 21, 12)
    about = json.loads(data.path.with_suffix(".json").read_text())
    assert about["source"] == f"imagefolder:{images}"
    assert (about["test_images"], about["classes"], about["image_size"]) == (6, 3, [3, 4])
    assert set(tmp_path.iterdir()) == {data.path, data.path.with_suffix(".json")}


def test_older_caches_of_the_folder_are_removed(images: Path, tmp_path: Path) -> None:
    for name, (source, _) in OLDER.items():
        (tmp_path / f"{name}.pt").touch()
        (tmp_path / f"{name}.json").write_text(json.dumps({"source": source.format(images=images)}))
    (tmp_path / "imagefolder-3.json").write_text("[")
    path = prepare(f"imagefolder:{images}", tmp_path, silent).path
    assert path is not None
    kept = [path.stem, *(name for name, (_, stays) in OLDER.items() if stays)]
    files = {f"{name}{suffix}" for name in kept for suffix in (".pt", ".json")} | {"imagefolder-3.json"}
    assert {file.name for file in tmp_path.iterdir()} == files


def test_folders_of_killed_runs_are_removed(images: Path, tmp_path: Path) -> None:
    with PrivateFolder(str(tmp_path)) as used:
        remove_abandoned_folders.cache_clear()
        abandoned = tmp_path / f"{PREFIX}12345678"
        abandoned.mkdir()
        (abandoned / "images.pt").touch()
        prepare(f"imagefolder:{images}", tmp_path, silent)
        assert list(tmp_path.glob(f"{PREFIX}*")) == [used]


@pytest.mark.usefixtures("no_torchvision")
def test_whole_cache_is_used_without_a_word(
    images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(images.parent))
    for text in (
        f"imagefolder:{images}",
        f"imagefolder:{images}/../{images.name}/",
        f"imagefolder:~/{images.name}",
    ):
        data = prepare(text, cache.parent, pytest.fail)
        assert (data.path, data.train_images) == (cache, 21)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SPOILT: dict[str, Callable[[Path], object]] = {
    "a byte": flip_a_byte,
    "cut": lambda cache: os.truncate(cache, 100),
    "no tensors": lambda cache: cache.unlink(),
    "no sidecar": lambda cache: cache.with_suffix(".json").unlink(),
}


def not_a_sidecar(text: str) -> Callable[[Path], object]:
    return lambda cache: cache.with_suffix(".json").write_text(text)


SPOILT |= {
    f"sidecar {text[:4]}": not_a_sidecar(text) for text in ("", "{", "{}", "[]", "null", "[" * 100_000)
}


def with_values(**values: object) -> Callable[[Path], object]:
    """Replace values of the sidecar."""

    def change(cache: Path) -> None:
        path = cache.with_suffix(".json")
        path.write_text(json.dumps(json.loads(path.read_text()) | values).replace("Infinity", "1e999"))

    return change


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILT |= {
    "infinite size": with_values(image_size=[math.inf, 32]),
    "negative size": with_values(image_size=[-1, 32]),
    "no pixels": with_values(image_size=[32, 0]),
    "negative count": with_values(train_images=-5),
    "huge count": with_values(test_images=math.inf),
    "fifo for a sidecar": lambda cache: put_fifo(cache.with_suffix(".json")),
    "fifo for tensors": put_fifo,
}


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("no_torchvision")
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_damaged_cache_is_not_read(images: Path, cache: Path, spoil: Callable[[Path], object]) -> None:
    spoil(cache)
    said: list[str] = []
    with pytest.raises(
        Refused,
        match=r"^--data imagefolder needs torchvision, which is not installed; install it, or",
    ):
        prepare(f"imagefolder:{images}", cache.parent, said.append)
    assert said == [f"the cache {cache} is damaged, rebuilding it"]


def test_two_runs_rebuild_a_damaged_cache(images: Path, cache: Path) -> None:
    whole = cache.read_bytes()
    flip_a_byte(cache)
    said: list[str] = []
    found: list[Data] = []
    both = threading.Barrier(2, timeout=60)

    def say(line: str) -> None:
        said.append(line)
        if "damaged" in line:
            both.wait()  # both runs have found the damage before one of them repairs it

    def run() -> None:
        found.append(prepare(f"imagefolder:{images}", cache.parent, say))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1] == prepare(f"imagefolder:{images}", cache.parent, pytest.fail)
    assert (
        sorted(said)
        == [f"decoding 27 images of {images}, once"] * 2
        + [f"the cache {cache} is damaged, rebuilding it"] * 2
    )
    assert cache.read_bytes() == whole
    assert {path.name for path in cache.parent.iterdir()} == {cache.name, cache.with_suffix(".json").name}


def lengthen(path: Path) -> None:
    """Change its size alone."""
    before = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path, ns=(before, before))


CHANGES: dict[str, Callable[[Path], object]] = {
    "time": lambda image: os.utime(image, ns=(0, image.stat().st_mtime_ns + 1)),
    "size": lambda image: lengthen(image),
    "name": lambda image: image.rename(image.with_name("other.png")),
    "new": lambda image: picture(image.with_name("other.png"), 1),
    "gone": lambda image: image.unlink(),
}
READ = {
    "imagefolder": ("train/bee/0.png", "test/bee/0.png"),
    "cifar10": ("cifar-10-batches-py/data_batch_2",),
}


@pytest.mark.parametrize(("name", "file"), [(name, file) for name, files in READ.items() for file in files])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_file_changes_the_key(
    change: Callable[[Path], object], name: str, file: str, tmp_path: Path
) -> None:
    def key() -> str:
        source = cache_module._read_option(f"{name}:{tmp_path}", tmp_path)
        assert source is not None
        assert source.kind == name
        return cache_module._key(source)

    for each in READ[name]:
        (tmp_path / each).parent.mkdir(parents=True)
        (tmp_path / each).write_bytes(b"content")
    before = key()
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / file).with_name("leads nowhere").symlink_to("nothing")
    assert key() == before
    change(tmp_path / file)
    assert key() != before


@pytest.mark.usefixtures("no_torchvision")
def test_cache_of_another_format_is_not_read(
    images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "FORMAT", cache_module.FORMAT + 1)
    with pytest.raises(Refused, match="needs torchvision"):
        prepare(f"imagefolder:{images}", cache.parent, silent)


def refused(text: str, folder: Path, sentence: str) -> None:
    """Check that `prepare` refuses in one sentence and leaves nothing in its folder."""
    with pytest.raises(Refused, match=sentence) as refusal:
        prepare(text, folder, silent)
    assert "\n" not in str(refusal.value)
    assert not folder.is_dir() or list(folder.iterdir()) == []


BAD: dict[str, tuple[str, str]] = {
    "unknown": (
        "foo",
        r"^--data must be synthetic, cifar10\[:DIR\] or imagefolder:DIR, got 'foo'; pass one of them$",
    ),
    "nothing": ("", r"^--data must be .*, got ''; pass one of them$"),
    "synthetic with a folder": ("synthetic:x", r"^--data must be .*, got 'synthetic:x'; pass one of them$"),
    "empty folder": ("cifar10:", r"^--data must be .*, got 'cifar10:'; pass one of them$"),
    "no folder": (
        "imagefolder",
        r"^--data imagefolder needs a folder; pass imagefolder:DIR with DIR/train/<class>/\* and",
    ),
    "missing": (
        "imagefolder:gone",
        r"^--data imagefolder needs a folder, but /.*/gone does not exist; pass imagefolder:DIR$",
    ),
    "long": (
        "imagefolder:" + "x" * 5000,
        r"^--data imagefolder needs a folder, but /.* does not exist; pass imagefolder:DIR$",
    ),
    "a file": (
        "cifar10:file",
        r"^--data cifar10 needs a folder, but /.*/file is no folder; pass cifar10:DIR$",
    ),
    "no train": (
        "imagefolder:empty",
        r"needs DIR/train/<class>/\* and DIR/test/<class>/\*, but /.*/empty has no folder train",
    ),
    "no test": (
        "imagefolder:half",
        r"^--data imagefolder:DIR needs .*, but /.*/half has no folder test; add it$",
    ),
    "no batches": (
        "cifar10:empty",
        r"^--data cifar10:DIR needs DIR/cifar-10-batches-py, but /.*/empty has no folder cifar",
    ),
    "a loop": (
        "imagefolder:loop",
        r"^/.*/train/bee/loop/.* cannot be read \(Too many levels of symbolic links\); make it",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), BAD.values(), ids=BAD)
def test_option_without_images_is_refused(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "train").mkdir(parents=True)
    (tmp_path / "file").touch()
    (images_in(tmp_path / "loop") / "train" / "bee" / "loop").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    refused(text, tmp_path / "data", sentence)


def test_refusal_of_the_decoder_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr("urllib.request._opener", None)  # it may hold proxies of another test
    sentence = (
        r"^CIFAR-10 cannot be downloaded from www.cs.toronto.edu \(.*refused\); pass cifar10:DIR with a"
    )
    refused("cifar10", tmp_path / "data", sentence)


def test_full_disk_is_refused_with_the_needed_bytes(images: Path, tmp_path: Path) -> None:
    with full_disk():
        sentence = r"^1 MB cannot be written to /.*/data \(File too large\); make room there for them$"
        refused(f"imagefolder:{images}", tmp_path / "data", sentence)


def test_death_of_the_decoder_is_refused(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = CompletedProcess([], 1, "", "Traceback\n\nRuntimeError: no operator nms\n\n")
    monkeypatch.setattr(cache_module, "run_child", lambda *arguments, on_line: finished)
    sentence = (
        r"were not decoded: the process exited with status 1 before it .* \(RuntimeError: no operator nms\)$"
    )
    refused(f"imagefolder:{images}", tmp_path / "data", sentence)


def test_cut_result_of_the_decoder_is_refused(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: Sequence[str], *arguments: object, on_line: object) -> CompletedProcess[str]:
        Path(command[-1], "result.json").write_text("")  # as a full disk leaves it
        return CompletedProcess([], 1, "", "OSError: No space left on device\n")

    monkeypatch.setattr(cache_module, "run_child", run)
    sentence = r"were not decoded: the process .* \(OSError: No space left on device\)$"
    refused(f"imagefolder:{images}", tmp_path / "data", sentence)


def test_decoder_without_an_end_is_refused(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: Sequence[str], *arguments: object, on_line: object) -> CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, 7200)

    monkeypatch.setattr(cache_module, "run_child", run)
    sentence = r"^decoding the images of /.* made no progress for 7200 s; check the disk, or name another"
    refused(f"imagefolder:{images}", tmp_path / "data", sentence)


@pytest.mark.parametrize("folder", ["file/data", "/sys/data"])
def test_cache_that_cannot_be_stored_is_refused(images: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    why = "Not a directory|Operation not permitted|Permission denied"
    sentence = rf"^decoded images cannot be stored in /.*/data \(({why})\); make it writable$"
    refused(f"imagefolder:{images}", tmp_path / folder, sentence)
