"""Modules of the current repository, which must not run as the code of another one."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from ddpperf.errors import CannotTrain
from ddpperf.workers.interpreter import Side
from ddpperf.workers.rank_entry import Guard, foreign, is_foreign, opened


@pytest.fixture
def present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose folder `package` is the current folder, and whose stored commit is to run."""
    base = tmp_path / "package" / ".ddpperf" / "base"
    for folder in (tmp_path, base):
        (folder / "package").mkdir(parents=True)
        (folder / ".git").touch()
    monkeypatch.chdir(tmp_path / "package")
    for name, value in Side(root=base / "package").variables().items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "foreign"),
    [
        ("package/helper.py", True),
        ("common/helper.py", True),  # of a neighbour, as PYTHONPATH or a .pth file names it
        ("link/helper.py", True),
        ("package/.ddpperf/base/package/helper.py", False),
        ("package/.ddpperf/base/common/helper.py", False),
        ("package/.venv/lib/python3.11/site-packages/helper.py", False),
        ("env/lib/python3.11/helper.py", False),  # Python's own library, as conda installs it
        ("../helper.py", False),
    ],
)
def test_module_of_the_present_repository_is_foreign(
    present: Path, file: str, foreign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "base_prefix", str(present / "env"))
    (present / "link").symlink_to("common")
    assert is_foreign("helper", str(present / file)) is foreign
    assert not is_foreign("torchvision.models", str(present / file)), "it may be built in place"


def test_modules_without_a_file_are_not_foreign(present: Path) -> None:
    assert not is_foreign("sys", "")
    assert foreign() == []


def test_model_may_not_import_the_present_code_later(present: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank would measure the present code, if the import is in a function or its path is sys.path's."""
    monkeypatch.setattr(sys, "meta_path", [Guard, *sys.meta_path])
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    (present / "package" / "late_helper.py").touch()
    with pytest.raises(
        CannotTrain, match=r"^late_helper would come from .*late_helper\.py, not from .*/base, whose"
    ):
        importlib.import_module("late_helper")
    (present / "package" / ".ddpperf" / "base" / "late_helper.py").touch()
    monkeypatch.syspath_prepend(str(present / "package" / ".ddpperf" / "base"))
    assert importlib.import_module("late_helper")
    del sys.modules["late_helper"]


def test_file_of_the_current_folder_is_not_read_in_place_of_the_sides(
    present: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr("io.open", opened)
    here, base = present / "package" / "config.json", present / "package/.ddpperf/base/package/config.json"
    here.write_text("new")
    assert Path("config.json").read_text() == "new", "the side has none, so it is data"
    base.write_text("old")
    with pytest.raises(
        CannotTrain, match=r"^config\.json of the current folder differs from .*; read it from"
    ):
        Path("config.json").read_text()
    assert base.read_text() == "old"
    base.write_text("new")
    with open("config.json", encoding="utf-8") as file:
        assert file.read() == "new"
