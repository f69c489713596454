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


def test_cache_into_which_others_write_is_not_used() -> None:
    folder = Path(compiler_cache("cuda")[CACHE_VARIABLE])
    for mode, used in ((0o720, False), (0o702, False), (0o755, True)):
        folder.chmod(mode)
        assert bool(compiler_cache("cuda")) == used


def test_users_own_folder_and_a_cpu_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed C++ compiler leaves damaged libraries in the cache, which torch would load."""
    assert compiler_cache("cpu") == {}
    monkeypatch.setenv(CACHE_VARIABLE, "/elsewhere")
    assert compiler_cache("cuda") == {}
