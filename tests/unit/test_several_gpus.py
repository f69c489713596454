"""tools/several_gpus.py measures the parts that are missing, and keeps what an interrupted part stored."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.command_line import Read, suite
from tests.project import REPOSITORY
from tools import several_gpus

# Stores a run, and sleeps until it is interrupted. argv[1]: --benchmark-json=FILE
SLEEPS = """
import pathlib, sys, time
pathlib.Path(sys.argv[1].partition("=")[2]).write_text("{}")
print("stored", flush=True)
time.sleep(600)
"""


def test_interrupted_part_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    several_gpus.run_part(tmp_path, "core-1", [sys.executable, "-c", SLEEPS], 1)
    assert (tmp_path / "core-1-interrupted.json").read_text() == "{}"
    assert (tmp_path / "core-1.txt").read_text().startswith("stored\n")
    assert "exit status -15 after" in capfd.readouterr().out
    asked: list[str] = []
    monkeypatch.setattr(several_gpus, "run_part", lambda folder, name, *_: asked.append(name))
    (tmp_path / "core-2.json").touch()
    several_gpus.measure(tmp_path, ["core-1", "core-2"], 100, [])
    assert asked == ["core-1"]
    several_gpus.measure(tmp_path, ["core-3"], 0.5, [])
    assert asked == ["core-1"], "no time for it"


def test_parts_name_tests_of_the_suite(read: Read) -> None:
    tests = {name.partition("[")[0] for cases in suite(read(gpus=4)).values() for name in cases}
    for arguments in several_gpus.PARTS.values():
        for named in (argument for argument in arguments if argument.startswith("perf/")):
            path, _, test = named.partition("::")
            assert (REPOSITORY / path).exists()
            assert not test or test in tests
