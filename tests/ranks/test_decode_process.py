"""Images are decoded in a child process: real ones once, and nothing runs on after the controller's
end.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddpperf.data.cache import prepare
from ddpperf.io.private_folders import PREFIX, remove_abandoned_folders
from tests.images import images_in
from tests.project import Marked, wait_until

CONTROLLER = """
import sys
from pathlib import Path
from ddpperf.data.cache import prepare
print(prepare(sys.argv[1], Path(sys.argv[2]), lambda line: print(line, flush=True)))
assert not {"torch", "torchvision"} & {*sys.modules}
"""
TORCH = "import time\nprint('importing', flush=True)\ntime.sleep(100)"  # a torch whose import takes long


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return images_in(tmp_path / "images")


def test_controller_decodes_and_reads_without_torch(images: Path, tmp_path: Path, marked: Marked) -> None:
    command = [sys.executable, "-c", CONTROLLER, f"imagefolder:{images}", str(tmp_path / "data")]
    first, second = (
        subprocess.check_output(command, text=True, env=marked.environment).splitlines() for _ in range(2)
    )
    assert first == [f"decoding 27 images of {images}, once", *second]
    assert second[0].startswith("Data(name='imagefolder'")
    assert len(second) == 1
    marked.assert_nothing_left()


def test_next_run_removes_what_a_killed_controller_left(images: Path, tmp_path: Path, marked: Marked) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    environment = marked.environment | {"PYTHONPATH": f"{marked.environment['PYTHONPATH']}:{tmp_path}"}
    command = [sys.executable, "-c", CONTROLLER, f"imagefolder:{images}", str(tmp_path / "data")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"importing\n"
        controller.kill()
    wait_until(lambda: not marked.processes(), 2, lambda: f"left running: {marked.processes()}")
    (left,) = (tmp_path / "data").iterdir()
    assert left.name.startswith(PREFIX), "a temporary folder, and no cache"
    remove_abandoned_folders(str(tmp_path / "data"))
    assert not left.exists()


def test_interrupted_controller_leaves_nothing(
    images: Path, tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def interrupt(line: str) -> None:
        assert len(marked.processes()) == 1
        raise KeyboardInterrupt(line)

    with pytest.raises(KeyboardInterrupt, match=r"^importing$"):
        prepare(f"imagefolder:{images}", tmp_path / "data", interrupt)
    assert marked.processes() == {}
    assert list((tmp_path / "data").iterdir()) == []
