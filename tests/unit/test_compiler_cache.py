"""The cache of compiled steps that ranks on GPUs use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddpperf.machine.compiler import CACHE_VARIABLE, compiler_cache

TORCHS_OWN = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    return tmp_path


def test_cache_is_the_one_that_torch_uses(temporary: Path) -> None:
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = [sys.executable, "-c", TORCHS_OWN]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert compiler_cache("cuda") == {CACHE_VARIABLE: found.stdout.strip()}


def test_cache_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_cache("cuda")
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.geteuid())
    assert compiler_cache("cuda") == {}


@pytest.mark.parametrize("others", [0o020, 0o002])
def test_cache_into_which_others_write_is_not_used(others: int) -> None:
    folder = Path(compiler_cache("cuda")[CACHE_VARIABLE])
    folder.chmod(0o700 | others)
    assert compiler_cache("cuda") == {}
    folder.chmod(0o755)
    assert compiler_cache("cuda") == {CACHE_VARIABLE: str(folder)}


def test_a_folder_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/elsewhere")
    assert compiler_cache("cuda") == {}


def test_ranks_on_a_cpu_have_no_cache() -> None:
    """A killed C++ compiler leaves damaged libraries there, which torch would load."""
    assert compiler_cache("cpu") == {}
