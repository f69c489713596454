"""Environments of torch's nightlies, from an index in a folder with wheels that hold only a version."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.package_index import add_wheel
from tools import torch_nightly

MONDAY, TUESDAY, FRIDAY = (f"2.15.0.dev202611{day}+cu130" for day in (16, 17, 20))
Nightly = Callable[..., tuple[int, str]]  # of the command line; returns exit status and output


@pytest.fixture
def index(tmp_path: Path) -> Path:
    add_wheel(tmp_path / "index", "numpy", "2.0.0", {})
    return tmp_path / "index"


@pytest.fixture
def nightly(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Nightly:
    monkeypatch.setenv("TORCH_NIGHTLY_INDEX", index.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in os.environ:
        if name.startswith(("GITHUB_", "PIP_")) and name != "PIP_CONFIG_FILE":
            monkeypatch.delenv(name)
    for name in ("PIP_INDEX_URL", "PIP_PRE", "PIP_DISABLE_PIP_VERSION_CHECK"):  # which the command sets
        monkeypatch.setenv(name, "")

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["torch_nightly", "--folder", str(tmp_path / "envs"), *arguments])
        status = torch_nightly.main()
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_index_must_be_named(nightly: Nightly, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NIGHTLY_INDEX")
    status, said = nightly("candidate")
    assert status == 4
    assert said.startswith(
        "TORCH_NIGHTLY_INDEX is not set; set it to the address of the index of torch's nightlies"
    )


@pytest.mark.slow
def test_nights_from_first_to_slower(
    nightly: Nightly, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, because making an environment takes seconds."""
    envs, output = tmp_path / "envs", tmp_path / "output"
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    status, said = nightly("candidate")
    assert status == 4
    assert "No matching distribution found for torch" in said

    add_wheel(index, "torch", "2.14.1", {})
    status, said = nightly("candidate")
    assert status == 4
    assert "pip found torch 2.14.1, which is no nightly; check TORCH_NIGHTLY_INDEX, and that pip's" in said

    add_wheel(index, "torch", MONDAY, {})
    status, said = nightly("candidate")
    assert status == 0, said
    against = f"--candidate={envs / MONDAY / 'bin' / 'python'}"
    assert f"    python -m pytest perf/ -m gate {against}\n" in said
    assert output.read_text() == f"version={MONDAY}\narguments={against}\ngood=\nfolder={envs}\n"
    assert nightly("accept", MONDAY) == (0, f"torch {MONDAY} is the last good nightly now\n")
    assert (envs / "last-good").resolve() == envs / MONDAY

    assert nightly("candidate")[1].endswith("and the last good one: nothing to compare\n")

    add_wheel(index, "torch", FRIDAY, {})
    output.unlink()
    (envs / MONDAY / "ready").write_text("another Python")
    status, said = nightly("candidate")
    base = f"--base={envs / MONDAY / 'bin' / 'python'}"
    against = f"--candidate={envs / FRIDAY / 'bin' / 'python'}"
    given = f"version={FRIDAY}\narguments={base} {against}\ngood={MONDAY}\nfolder={envs}\n"
    assert output.read_text() == given
    for name in (MONDAY, FRIDAY):
        assert (envs / name / "ready").read_text() == sys.version
    add_wheel(index, "torch", TUESDAY, {})
    status, said = nightly("candidate", "--version", TUESDAY.partition("+")[0])
    assert status == 0, said
    assert (envs / TUESDAY / "ready").exists(), "an older nightly by name, without its suffix"
