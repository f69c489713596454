"""python -m ddpperf.init writes an example and never changes a file that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpperf.errors import Refused
from ddpperf.init.__main__ import FILES, TEMPLATE, main, write

CONFTEST_LINE = 'pytest_plugins = ["ddpperf.plugin"]'


def test_all_files_are_written(tmp_path: Path) -> None:
    assert write(tmp_path)[-1] == "next: run it: python -m pytest perf/"
    for name in (*FILES, "conftest.py"):
        assert (tmp_path / name).read_text() == (TEMPLATE / name).read_text()
    assert (tmp_path / ".gitignore").read_text() == ".ddpperf/\n"


@pytest.mark.parametrize("name", FILES)
def test_existing_example_file_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    with pytest.raises(Refused, match=rf"{name} exists already, so nothing was written; move the file away"):
        write(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(name).name]


@pytest.mark.parametrize("before", ["import pytest\n", f"# {CONFTEST_LINE}\n"])
def test_existing_conftest_is_kept(tmp_path: Path, before: str) -> None:
    conftest = tmp_path / "conftest.py"
    conftest.write_text(before)
    assert write(tmp_path)[-1].startswith(f"next: add this line to conftest.py: {CONFTEST_LINE}; then run")
    assert conftest.read_text() == before


@pytest.mark.parametrize("before", ["build/\n", "build/", ".ddpperf/\n"])
def test_gitignore_gets_one_line(tmp_path: Path, before: str) -> None:
    (tmp_path / ".gitignore").write_text(before)
    write(tmp_path)
    lines = (tmp_path / ".gitignore").read_text().splitlines()
    assert lines.count(".ddpperf/") == 1
    assert set(before.splitlines()) <= set(lines)


def test_command_refuses_with_status_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["init"])
    assert (main(), capsys.readouterr().err) == (0, "")
    assert (main(), capsys.readouterr().err.count("\n")) == (4, 1)
