"""Runs in an ASCII locale, in a folder whose name is not UTF-8, of tests with other letters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import Project, git

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}
TEST = """
from ddpperf.specs import AllReduceSpec

def test_passes(measure):
    measure(AllReduceSpec(world_size=2, nbytes=1024))

def test_fails(measure):
    measure(AllReduceSpec(world_size=2, nbytes=2048))
    raise ValueError("größer \\udcff als €")
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    root = tmp_path / os.fsdecode(b"caf\xe9 \xff \xe2\x82\xac")
    root.mkdir()
    mine = Project(root)
    mine.experiment.rename(mine.experiment.with_name(os.fsdecode(b"test_\xe2\x82\xac_\xff.py")))
    mine.experiment = mine.experiment.with_name(os.fsdecode(b"test_\xe2\x82\xac_\xff.py"))
    mine.experiment.write_text(TEST, encoding="utf-8")
    (root / "perf" / "thresholds.toml").write_text("# größer\n", encoding="utf-8")
    mine.environment |= ASCII
    yield mine
    mine.clean()


@pytest.mark.slow
def test_ascii_locale_writes_every_output(project: Project) -> None:
    git(project.root, "init", "--quiet")
    outputs = ["--verdict", "verdict.md", "--report", "page.html", "--junitxml", "j.xml", "--tables"]
    run = project.run("perf", *outputs)
    assert run.status == 1, run
    assert "FAIL: perf/test_" in run.output
    for failure in ("could not be", "was not saved", "INTERNALERROR", "Traceback"):
        assert failure not in run.output, run
    # pytest itself cannot write a test's name that is not UTF-8
    assert "another plugin failed while the run ended: UnicodeEncodeError" in run.output
    for name in ("verdict.md", "page.html"):
        assert "größer" in (project.root / name).read_text(encoding="utf-8"), name
    (saved,) = project.saved_runs()
    assert len(saved["benchmarks"]) == 2
