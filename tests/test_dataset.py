"""Real images are decoded once, by a process that leaves nothing behind, and never read from a cache that is not whole."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from PIL import Image

from ddpperf.plugin import dataset
from ddpperf.plugin.dataset import Data, prepare
from tests.project import Marked, wait_until


def picture(path: Path, colour: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), (colour, 0, 255 - colour)).save(path)


def images_in(folder: Path) -> Path:
    for number, name in enumerate(
        ("train/ape/0.png", "train/ape/1.png", "train/bee/0.png", "test/ape/0.png", "test/bee/0.png")
    ):
        picture(folder / name, number)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images_in(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def decoded(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, list[str]]:
    said: list[str] = []
    return prepare(f"imagefolder:{images}", tmp_path_factory.mktemp("caches") / "new" / "data", said.append), said


@pytest.fixture
def cache(images: Path, decoded: tuple[Data, list[str]], tmp_path: Path) -> Path:
    """A copy of the decoded images' cache, the file of the tensors in a folder of its own."""
    path = decoded[0].path
    assert path is not None
    for each in (path, path.with_suffix(".json")):
        (tmp_path / each.name).write_bytes(each.read_bytes())
    return tmp_path / path.name


@pytest.fixture
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be decoded, so whatever is had comes from the cache."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


def silent(line: str) -> None:
    pass


def test_synthetic_images_need_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert prepare("synthetic", folder, silent) == Data(name="synthetic", path=None, digest="", train_images=50_000)
    assert not folder.exists()


def test_the_controller_imports_no_torch(cache: Path, images: Path) -> None:
    code = "import sys; from pathlib import Path; from ddpperf.plugin.dataset import prepare; "
    code += "print(prepare(sys.argv[1], Path(sys.argv[2]), print)); assert not {'torch', 'torchvision'} & {*sys.modules}"
    arguments = [f"imagefolder:{images}", str(cache.parent)]
    assert "Data(name='imagefolder'" in subprocess.check_output([sys.executable, "-c", code, *arguments], text=True)


def test_images_are_decoded_into_a_file_and_its_sidecar(images: Path, decoded: tuple[Data, list[str]]) -> None:
    data, said = decoded
    assert said == [f"decoding 5 images of {images}, once"]
    assert data.path is not None
    assert (data.name, data.train_images, len(data.digest)) == ("imagefolder", 3, 12)
    assert {path.name for path in data.path.parent.iterdir()} == {data.path.name, data.path.with_suffix(".json").name}
    about = json.loads(data.path.with_suffix(".json").read_text())
    assert about["source"] == f"imagefolder:{images}"
    assert (about["test_images"], about["classes"], about["image_size"]) == (2, 2, [3, 4])


@pytest.mark.usefixtures("no_torchvision")
def test_a_whole_cache_is_used_without_a_word(
    images: Path, cache: Path, decoded: tuple[Data, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("HOME", str(images.parent))
    for text in (f"imagefolder:{images}", f"imagefolder:{images}/../{images.name}/", f"imagefolder:~/{images.name}"):
        data = prepare(text, cache.parent, said.append)
        assert (data.path, data.digest, data.train_images) == (cache, decoded[0].digest, 3)
    assert said == []


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


SPOILT |= {f"sidecar {text[:4]}": not_a_sidecar(text) for text in ("", "{", "{}", "[]", "null", "[" * 100_000)}


@pytest.mark.usefixtures("no_torchvision")
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_damaged_cache_is_not_read(images: Path, cache: Path, spoil: Callable[[Path], object]) -> None:
    spoil(cache)
    said: list[str] = []
    with pytest.raises(
        pytest.UsageError, match=r"^--data imagefolder needs torchvision, which is not installed; install it, or"
    ):
        prepare(f"imagefolder:{images}", cache.parent, said.append)
    assert said == [f"the cache {cache} is damaged, rebuilding it"]


def test_a_damaged_cache_is_rebuilt(images: Path, cache: Path, decoded: tuple[Data, list[str]]) -> None:
    whole = cache.read_bytes()
    flip_a_byte(cache)
    said: list[str] = []
    assert prepare(f"imagefolder:{images}", cache.parent, said.append).digest == decoded[0].digest
    assert said == [f"the cache {cache} is damaged, rebuilding it", f"decoding 5 images of {images}, once"]
    assert cache.read_bytes() == whole


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


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_changed_file_changes_the_key(change: Callable[[Path], object], tmp_path: Path) -> None:
    def key() -> str:
        source = dataset._read_option(f"imagefolder:{tmp_path}", tmp_path)
        assert source is not None
        return dataset._key(source)

    images_in(tmp_path)
    before = key()
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "train" / "bee" / "leads nowhere").symlink_to("nothing")
    assert key() == before
    change(tmp_path / "train" / "bee" / "0.png")
    assert key() != before


@pytest.mark.usefixtures("no_torchvision")
def test_a_cache_of_another_form_is_not_read(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "FORM", dataset.FORM + 1)
    with pytest.raises(pytest.UsageError, match="needs torchvision"):
        prepare(f"imagefolder:{images}", cache.parent, silent)


def test_changed_images_are_decoded_anew_and_their_old_cache_is_removed(tmp_path: Path, cache: Path) -> None:
    folder = images_in(tmp_path / "images")
    first = prepare(f"imagefolder:{folder}", cache.parent, silent)
    picture(folder / "test" / "bee" / "0.png", 77)
    second = prepare(f"imagefolder:{folder}", cache.parent, silent)
    assert first.path is not None
    assert second.path is not None
    assert first.digest != second.digest
    kept = {path.with_suffix(suffix) for path in (cache, second.path) for suffix in (".pt", ".json")}
    assert {path for path in cache.parent.iterdir() if path.is_file()} == kept  # another folder's cache stays


BAD: dict[str, tuple[str, str]] = {
    "unknown": ("foo", r"^--data must be synthetic, cifar10\[:DIR\] or imagefolder:DIR, got 'foo'; pass one of them$"),
    "nothing": ("", r"^--data must be .*, got ''; pass one of them$"),
    "synthetic with a folder": ("synthetic:x", r"^--data must be .*, got 'synthetic:x'; pass one of them$"),
    "empty folder": ("cifar10:", r"^--data must be .*, got 'cifar10:'; pass one of them$"),
    "no folder": ("imagefolder", r"^--data imagefolder needs a folder; pass imagefolder:DIR with DIR/train/<class>/\* and"),
    "missing": ("imagefolder:gone", r"^--data imagefolder needs a folder, but /.*/gone does not exist; pass imagefolder:DIR$"),
    "long": ("imagefolder:" + "x" * 5000, r"^--data imagefolder needs a folder, but /.* does not exist; pass imagefolder:DIR$"),
    "a file": ("cifar10:file", r"^--data cifar10 needs a folder, but /.*/file is no folder; pass cifar10:DIR$"),
    "no train": ("imagefolder:empty", r"needs DIR/train/<class>/\* and DIR/test/<class>/\*, but /.*/empty has no folder train"),
    "no test": ("imagefolder:half", r"^--data imagefolder:DIR needs .*, but /.*/half has no folder test; add it$"),
    "no batches": ("cifar10:empty", r"^--data cifar10:DIR needs DIR/cifar-10-batches-py, but /.*/empty has no folder cifar"),
    "a loop": ("imagefolder:loop", r"^/.*/train/bee/loop/.* cannot be read \(Too many levels of symbolic links\); make it"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), BAD.values(), ids=BAD)
def test_what_names_no_images_is_refused_in_a_sentence(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "train").mkdir(parents=True)
    (tmp_path / "file").touch()
    (images_in(tmp_path / "loop") / "train" / "bee" / "loop").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    refused(text, tmp_path / "data", sentence)


def refused(text: str, folder: Path, sentence: str) -> None:
    """`prepare` refuses in a sentence, and leaves nothing in its folder."""
    with pytest.raises(pytest.UsageError, match=sentence) as refusal:
        prepare(text, folder, silent)
    assert "\n" not in str(refusal.value)
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_what_the_process_refuses_is_said(tmp_path: Path) -> None:
    folder = images_in(tmp_path / "images")
    (folder / "test" / "bee" / "0.jpg").write_text("no image")
    refused(
        f"imagefolder:{folder}", tmp_path / "data", r"/test/bee/0.jpg cannot be decoded \(it is no image\); repair or remove"
    )


def test_a_process_that_dies_is_said_with_the_end_of_its_output(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sentence = (
        r"were not decoded: the process exited with status 1 before it answered \(RuntimeError: operator torchvision::nms"
    )
    refused(f"imagefolder:{images}", tmp_path / "data", sentence)


CHECKSUMS = """
from torchvision.datasets import CIFAR10
CIFAR10.train_list = [(name, {md5!r}) for name, _ in CIFAR10.train_list]
CIFAR10.test_list = [(name, {md5!r}) for name, _ in CIFAR10.test_list]
CIFAR10.meta = CIFAR10.meta | {{"md5": {md5!r}}}
CIFAR10.__len__ = lambda self: print("no answer") or len(self.data)
"""


def test_cifar10_of_a_folder_is_decoded_whatever_torchvision_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches in the published form, for whose checksums the process' torchvision asks."""
    pixels = numpy.arange(2 * 3072, dtype=numpy.uint8).reshape(2, 3072)
    content = pickle.dumps({"data": pixels, "labels": [3, 7], "label_names": list("abcdefghij")})
    (tmp_path / "cifar" / "cifar-10-batches-py").mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (tmp_path / "cifar" / "cifar-10-batches-py" / name).write_bytes(content)
    (tmp_path / "sitecustomize.py").write_text(CHECKSUMS.format(md5=hashlib.md5(content).hexdigest()))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = prepare(f"cifar10:{tmp_path / 'cifar'}", tmp_path / "data", silent)
    assert (data.name, data.train_images) == ("cifar10", 10)
    assert prepare(f"cifar10:{tmp_path / 'cifar'}", tmp_path / "data", pytest.fail) == data
    (tmp_path / "cifar" / "cifar-10-batches-py" / "data_batch_2").write_bytes(content[:-1])
    with pytest.raises(pytest.UsageError, match=r"/cifar-10-batches-py/data_batch_2 is missing or damaged; cifar10:DIR needs"):
        prepare(f"cifar10:{tmp_path / 'cifar'}", tmp_path / "data", silent)


def test_cifar10_that_cannot_be_downloaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    sentence = r"^CIFAR-10 cannot be downloaded from www.cs.toronto.edu \(.*Connection refused\); pass cifar10:DIR with a copy"
    refused("cifar10", tmp_path / "data", sentence)


@pytest.mark.parametrize("folder", ["file/data", "/sys/data"])
def test_a_cache_that_cannot_be_kept_is_refused(images: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    sentence = (
        r"^decoded images cannot be kept in /.*/data \((Not a directory|Operation not permitted|Permission denied)\); see"
    )
    refused(f"imagefolder:{images}", tmp_path / folder, sentence)


def test_a_full_disk_is_refused_with_the_bytes_that_are_needed(images: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        sentence = r"^1 MB cannot be written to /.*/data \(File too large\); make room there for them$"
        refused(f"imagefolder:{images}", tmp_path / "data", sentence)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_runs_at_once_leave_one_whole_cache(tmp_path: Path, images: Path) -> None:
    found: list[Data] = []
    threads = [
        threading.Thread(target=lambda: found.append(prepare(f"imagefolder:{images}", tmp_path, silent))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1] == prepare(f"imagefolder:{images}", tmp_path, pytest.fail)
    assert len(list(tmp_path.iterdir())) == 2


CONTROLLER = """
import sys
from pathlib import Path
from ddpperf.plugin.dataset import prepare
prepare(sys.argv[1], Path(sys.argv[2]), lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_an_interrupted_run(tmp_path: Path, marked: Marked, number: signal.Signals) -> None:
    folder = images_in(tmp_path / "images")
    for each in range(1000):  # so many that workers decode them
        os.link(folder / "train" / "ape" / "0.png", folder / "train" / "ape" / f"link{each}.png")
    os.mkfifo(folder / "train" / "bee" / "never_ends.png")
    caches = tmp_path / "data"
    command = [sys.executable, "-c", CONTROLLER, f"imagefolder:{folder}", str(caches)]
    with subprocess.Popen(command, env=marked.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as controller:
        assert controller.stdout is not None
        assert b"decoding 1,006 images of" in controller.stdout.readline()
        wait_until(lambda: len(marked.processes()) > 2, 10, lambda: f"no workers: {marked.processes()}")
        assert len(list(caches.iterdir())) == 1
        controller.send_signal(number)
        assert controller.wait(timeout=10) != 0
    marked.assert_nothing_left()
    assert list(caches.iterdir()) == []
