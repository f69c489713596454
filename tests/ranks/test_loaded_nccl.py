"""The version of NCCL that a rank has loaded, also if LD_PRELOAD replaces torch's library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddpperf.errors import Refused
from ddpperf.workers.interpreter import Side, check_side

SOURCE = "int ncclGetVersion(int *version) { *version = 29907; return 0; }"
PRINT = "from ddpperf.workers.rank_commands import loaded_nccl; print(loaded_nccl())"


def compiled(folder: Path, *options: str) -> Path:
    """Return a shared library that says that it is NCCL 2.99.7."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    source, library = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", library, source], check=True)
    return library


def test_preloaded_nccl_is_the_loaded_version(tmp_path: Path) -> None:
    environment = os.environ | {"LD_PRELOAD": str(compiled(tmp_path))}
    assert subprocess.check_output([sys.executable, "-c", PRINT], env=environment, text=True) == "2.99.7\n"


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch for the CPU loads no NCCL")
def test_library_that_torch_cannot_use_is_refused(tmp_path: Path) -> None:
    library = compiled(tmp_path, "-Wl,-soname,libnccl.so.2")  # replaces torch's own library
    side = Side(name="B", environment={"LD_PRELOAD": str(library)})
    with pytest.raises(Refused, match=r"undefined symbol: nccl.*; name libraries that fit torch") as refused:
        check_side(side, "--candidate LD_PRELOAD", "cpu", [])
    assert "\n" not in str(refused.value)
