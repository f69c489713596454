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


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the cache on a GPU."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    return Path(compiler_cache("cuda")[CACHE_VARIABLE])


@pytest.mark.slow
def test_cache_is_the_one_that_torch_uses(cache: Path) -> None:
    environment = os.environ | {"TMPDIR": str(cache.parent)}
    found = subprocess.check_output([sys.executable, "-c", TORCHS_OWN], env=environment, text=True)
    assert found == f"{cache}\n"


def test_cache_of_other_users_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, used in ((0o720, False), (0o702, False), (0o755, True)):
        cache.chmod(mode)
        assert bool(compiler_cache("cuda")) == used
    cache.rename(cache.with_name("other"))
    cache.symlink_to(cache.with_name("other"))
    assert compiler_cache("cuda") == {}
    cache.unlink()
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.geteuid())
    assert compiler_cache("cuda") == {}


def test_users_own_folder_and_a_cpu_need_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed C++ compiler leaves damaged libraries in the cache, which torch would load."""
    assert compiler_cache("cpu") == {}
    monkeypatch.setenv(CACHE_VARIABLE, "/elsewhere")
    assert compiler_cache("cuda") == {}
