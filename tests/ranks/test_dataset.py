"""Real images are decoded once, by a process that leaves nothing behind, and never read from a cache that is not whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpperf.data import cache as dataset
from ddpperf.data.cache import Data, prepare
from ddpperf.errors import Refused
from tests.images import images_in, picture, silent
from tests.project import Marked


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images_in(tmp_path_factory.mktemp("images"))


OLDER = {  # what lies in a folder of caches: what remains of it when other images of the same folder are decoded
    "imagefolder-0": ("imagefolder:{images}", False),
    "imagefolder-1": ("imagefolder:/elsewhere", True),
    "cifar10-2": ("imagefolder:{images}", True),
}


@pytest.fixture(scope="module")
def decoded(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, list[str]]:
    folder = tmp_path_factory.mktemp("caches")
    for name, (source, _) in OLDER.items():
        (folder / f"{name}.pt").touch()
        (folder / f"{name}.json").write_text(json.dumps({"source": source.format(images=images)}))
    (folder / "imagefolder-3.json").write_text("[")
    said: list[str] = []
    return prepare(f"imagefolder:{images}", folder, said.append), said


@pytest.fixture
def cache(decoded: tuple[Data, list[str]], tmp_path: Path) -> Path:
    """A copy of the decoded images' cache, the file of the tensors in a folder of its own."""
    path = decoded[0].path
    assert path is not None
    (tmp_path / "caches").mkdir()
    for each in (path, path.with_suffix(".json")):
        (tmp_path / "caches" / each.name).write_bytes(each.read_bytes())
    return tmp_path / "caches" / path.name


@pytest.fixture
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be decoded, so whatever is had comes from the cache."""
    monkeypatch.setitem(sys.modules, "torchvision", None)


def test_synthetic_images_need_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert prepare("synthetic", folder, silent) == Data(
        name="synthetic", path=None, digest="", train_images=50_000, test_images=1024
    )
    assert not folder.exists()


def test_the_controller_imports_no_torch(cache: Path, images: Path) -> None:
    code = "import sys; from pathlib import Path; from ddpperf.data.cache import prepare; "
    code += "print(prepare(sys.argv[1], Path(sys.argv[2]), print)); assert not {'torch', 'torchvision'} & {*sys.modules}"
    arguments = [f"imagefolder:{images}", str(cache.parent)]
    assert "Data(name='imagefolder'" in subprocess.check_output(
        [sys.executable, "-c", code, *arguments], text=True
    )


def test_images_are_decoded_into_a_file_and_its_sidecar(
    images: Path, decoded: tuple[Data, list[str]]
) -> None:
    data, said = decoded
    assert said == [f"decoding 27 images of {images}, once"]
    assert data.path is not None
    assert (data.name, data.train_images, len(data.digest)) == ("imagefolder", 21, 12)
    about = json.loads(data.path.with_suffix(".json").read_text())
    assert about["source"] == f"imagefolder:{images}"
    assert (about["test_images"], about["classes"], about["image_size"]) == (6, 3, [3, 4])


def test_only_what_was_cached_of_the_same_folder_before_is_removed(decoded: tuple[Data, list[str]]) -> None:
    assert decoded[0].path is not None
    kept = [decoded[0].path.stem, *(name for name, (_, stays) in OLDER.items() if stays)]
    files = {f"{name}{suffix}" for name in kept for suffix in (".pt", ".json")} | {"imagefolder-3.json"}
    assert {path.name for path in decoded[0].path.parent.iterdir()} == files


@pytest.mark.usefixtures("no_torchvision")
def test_a_whole_cache_is_used_without_a_word(
    images: Path, cache: Path, decoded: tuple[Data, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(images.parent))
    for text in (
        f"imagefolder:{images}",
        f"imagefolder:{images}/../{images.name}/",
        f"imagefolder:~/{images.name}",
    ):
        data = prepare(text, cache.parent, pytest.fail)
        assert (data.path, data.digest, data.train_images) == (cache, decoded[0].digest, 21)


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


@pytest.mark.usefixtures("no_torchvision")
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_damaged_cache_is_not_read(images: Path, cache: Path, spoil: Callable[[Path], object]) -> None:
    spoil(cache)
    said: list[str] = []
    with pytest.raises(
        Refused,
        match=r"^--data imagefolder needs torchvision, which is not installed; install it, or",
    ):
        prepare(f"imagefolder:{images}", cache.parent, said.append)
    assert said == [f"the cache {cache} is damaged, rebuilding it"]


def test_a_damaged_cache_is_rebuilt_by_two_runs_at_once(
    images: Path, cache: Path, decoded: tuple[Data, list[str]]
) -> None:
    whole = cache.read_bytes()
    flip_a_byte(cache)
    said: list[str] = []
    found: list[Data] = []

    def run() -> None:
        found.append(prepare(f"imagefolder:{images}", cache.parent, said.append))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1] == prepare(f"imagefolder:{images}", cache.parent, pytest.fail)
    assert found[0].digest == decoded[0].digest
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
def test_every_changed_file_changes_the_key(
    change: Callable[[Path], object], name: str, file: str, tmp_path: Path
) -> None:
    def key() -> str:
        source = dataset._read_option(f"{name}:{tmp_path}", tmp_path)
        assert source is not None
        assert source.kind == name
        return dataset._key(source)

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
def test_a_cache_of_another_form_is_not_read(
    images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "FORM", dataset.FORM + 1)
    with pytest.raises(Refused, match="needs torchvision"):
        prepare(f"imagefolder:{images}", cache.parent, silent)


CONTROLLER = """
import sys
from pathlib import Path
from ddpperf.data.cache import prepare
prepare(sys.argv[1], Path(sys.argv[2]), lambda line: print(line, flush=True))
"""


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path, marked: Marked) -> None:
    folder, caches = images_in(tmp_path / "images"), tmp_path / "data"
    os.mkfifo(folder / "train" / "bee" / "never_ends.png")
    command = [sys.executable, "-c", CONTROLLER, f"imagefolder:{folder}", str(caches)]
    with subprocess.Popen(
        command, env=marked.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as controller:
        try:
            assert controller.stdout is not None
            assert b"decoding 28 images of" in controller.stdout.readline()
            assert len(marked.processes()) == 2
            assert len(list(caches.iterdir())) == 1
        finally:
            controller.kill()
    marked.assert_nothing_left()
    assert list(caches.iterdir()) == []


def test_nothing_is_left_of_an_interrupted_run(
    images: Path, tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, while the decoder still imports a torch that takes long."""
    (tmp_path / "torch.py").write_text(
        'import time\nprint(\'{"say": "importing"}\', flush=True)\ntime.sleep(100)'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def interrupt(line: str) -> None:
        assert len(marked.processes()) == 1
        raise KeyboardInterrupt(line)

    with pytest.raises(KeyboardInterrupt, match=r"^importing$"):
        prepare(f"imagefolder:{images}", tmp_path / "data", interrupt)
    assert marked.processes() == {}
    assert list((tmp_path / "data").iterdir()) == []
