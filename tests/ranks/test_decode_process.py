"""Images are decoded once, in a child process, and the controller imports no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.images import images_in
from tests.project import Marked

CONTROLLER = """
import sys
from pathlib import Path

import pytest
from ddpperf.data.cache import prepare
print(prepare(sys.argv[1], Path(sys.argv[2]), lambda line: print(line, flush=True)))
assert not {"torch", "torchvision"} & {*sys.modules}
"""


@pytest.mark.slow
def test_controller_decodes_and_reads_without_torch(tmp_path: Path, marked: Marked) -> None:
    images = images_in(tmp_path / "images")
    command = [sys.executable, "-c", CONTROLLER, f"imagefolder:{images}", str(tmp_path / "data")]
    first, second = (
        subprocess.check_output(command, text=True, env=marked.environment).splitlines() for _ in range(2)
    )
    assert first == [f"decoding the images of {images}, once", *second]
    assert second[0].startswith("Data(name='imagefolder'")
    assert len(second) == 1
    marked.assert_nothing_left()
