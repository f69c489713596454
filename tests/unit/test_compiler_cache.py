"""The cache of compiled steps that the ranks of a plain run use."""

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
    assert compiler_cache() == {CACHE_VARIABLE: found.stdout.strip()}
    assert Path(found.stdout.strip()).is_dir()


def test_cache_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(compiler_cache()[CACHE_VARIABLE]).mkdir()
    assert compiler_cache()
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.geteuid())
    assert compiler_cache() == {}


def test_another_users_link_is_not_used(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(compiler_cache()[CACHE_VARIABLE]).symlink_to(temporary / "missing")
    monkeypatch.setattr(os, "getuid", lambda: 1 + os.geteuid())
    assert compiler_cache() == {}


def test_a_folder_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/elsewhere")
    assert compiler_cache() == {}


def test_a_user_without_a_name_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert compiler_cache() == {}
