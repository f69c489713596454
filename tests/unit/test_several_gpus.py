"""tools/several_gpus.py measures the parts that are missing, and prints one table of all parts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.project import REPOSITORY, script

BASELINES = REPOSITORY / "perf" / "baselines" / "h200x2"


@pytest.fixture(scope="module", name="tool")
def several_gpus() -> ModuleType:
    return script("several_gpus")


def test_table_has_the_figures_of_all_stored_runs(tool: ModuleType, tmp_path: Path) -> None:
    shutil.copy(BASELINES / "0007_communication.json", tmp_path / "all_reduce.json")
    shutil.copy(BASELINES / "0001_where.json", tmp_path / "split.json")
    for name in ("2.txt", "2-graph.txt"):
        shutil.copy(REPOSITORY / "docs" / "nccl_tests" / "h200x2" / name, tmp_path / name)
    table = tool.table(tmp_path)
    ddp = "2 GPUs, batch 512 per rank, resnet18_cifar, graph, ddp+avg_hook+view+no_buffer_sync"
    assert f"| weak efficiency | {ddp} | 95.7%, 9.071 ms a step |" in table
    assert "| NCCL over the fastest other | 2 devices, 1MiB | 1.78x (" in table
    assert "| NCCL from torch over nccl-tests | 2 devices, 16MiB, graph | 0.984 |" in table
    assert "| tests at the slower pace | split | 0 of" in table
    # step 9.063 ms, exposed 0.4094 ms by difference and 0.1521 ms in the trace
    (split,) = [
        row
        for row in table.splitlines()
        if "batch 512 per rank" in row and "methods" in row and "graph" in row
    ]
    assert "| 2.8% of the step |" in split


def test_figures_of_equal_trainings_are_medians(tool: ModuleType, tmp_path: Path) -> None:
    """The first case trained for 319.6 ms, 322.0 ms and 320.2 ms."""
    shutil.copy(BASELINES / "0004_communication.json", tmp_path / "core-1.json")
    shutil.copy(BASELINES / "0007_communication.json", tmp_path / "core-2.json")
    shutil.copy(REPOSITORY / "docs" / "own_ddp" / "h200x4.json", tmp_path / "scaling.json")
    rows = tool.table(tmp_path).splitlines()
    first, *_ = [row for row in rows if row.startswith("| epoch | 2 GPUs, batch 512 per rank, ")]
    assert first.endswith(" | 320.2 ms |")
    (gustafson,) = [row for row in rows if row.startswith("| test_gustafson | 4 GPUs, batch 512 per rank, ")]
    assert gustafson.endswith(" | serial_fraction 0.07139 |")
    assert [row.split(":")[0] for row in rows[2:5]] == [
        "| core-1, 245 s | verdict | PASS",
        "| core-2, 266 s | verdict | PASS",
        "| scaling, 540 s | verdict | FAIL",
    ]


def test_part_is_interrupted_and_not_measured_twice(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The part writes a stored run, and then sleeps until it is interrupted."""
    program = """
import pathlib, sys, time
pathlib.Path(sys.argv[1].removeprefix("--benchmark-json=")).write_text("{}")
print("stored", flush=True)
time.sleep(600)
"""
    tool.run_part(tmp_path, "core-1", [sys.executable, "-c", program], 3)
    assert (tmp_path / "core-1.json").read_text() == "{}"
    assert (tmp_path / "core-1.txt").read_text().startswith("stored\n")
    monkeypatch.setattr(tool, "run_part", None)  # a call would raise
    tool.measure(tmp_path, ["core-1"], 100, [])
    tool.measure(tmp_path, ["core-2"], 0.5, [])
    assert "exit status -2 after" in capfd.readouterr().out


def test_part_that_stores_nothing_is_measured_again(tool: ModuleType, tmp_path: Path) -> None:
    """pytest-benchmark makes an empty file, and a usage error leaves it empty."""
    program = "import sys; open(sys.argv[1].removeprefix('--benchmark-json='), 'w'); sys.exit(4)"
    tool.run_part(tmp_path, "core-1", [sys.executable, "-c", program], 60)
    assert not (tmp_path / "core-1.json").exists()


def test_unknown_part_is_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path / "new"), "--only", "core-1,splits"])
    assert "--only: unknown parts splits; the parts are core-1, core-2, " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
