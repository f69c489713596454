"""tools/several_gpus.py measures the parts that are missing, and prints one table of all parts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.project import REPOSITORY, script, wait_until

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
    shutil.copy(REPOSITORY / "docs" / "own_ddp" / "h200x4.json", tmp_path / "own_ddp.json")
    rows = tool.table(tmp_path).splitlines()
    first, *_ = [row for row in rows if row.startswith("| epoch | 2 GPUs, batch 512 per rank, ")]
    assert first.endswith(" | 320.2 ms |")
    (gustafson,) = [row for row in rows if row.startswith("| test_gustafson | 4 GPUs, batch 512 per rank, ")]
    assert gustafson.endswith(" | serial_fraction 0.07139 |")
    assert [row.split(":")[0] for row in rows[2:5]] == [
        "| core-1, 245 s | verdict | PASS",
        "| core-2, 266 s | verdict | PASS",
        "| own_ddp, 540 s | verdict | FAIL",
    ]


@pytest.mark.parametrize(
    "damaged", ["", "{", "{}", "[1]", '{"ddpperf": {"outcomes": {}}, "benchmarks": [5]}']
)
def test_damaged_and_foreign_files_spoil_no_table(tool: ModuleType, tmp_path: Path, damaged: str) -> None:
    shutil.copy(BASELINES / "0001_where.json", tmp_path / "split.json")
    (tmp_path / "core-1.json").write_text(damaged)
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "buckets.json").mkdir()
    table = tool.table(tmp_path)
    for name in ("core-1", "buckets"):
        wanted = f"| {name} | verdict | {name}.json is damaged; remove it to measure the part again |"
        assert wanted in table
    assert "| tests at the slower pace | split | 0 of" in table
    assert "notes" not in table


# Stores a run, and sleeps until it is interrupted. argv[1]: --benchmark-json=FILE
SLEEPS = """
import pathlib, sys, time
pathlib.Path(sys.argv[1].partition("=")[2]).write_text("{}")
print("stored", flush=True)
time.sleep(600)
"""


def test_interrupted_part_is_measured_again(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The part writes a stored run, and then sleeps until it is interrupted."""
    tool.run_part(tmp_path, "core-1", [sys.executable, "-c", SLEEPS], 3)
    assert (tmp_path / "core-1-interrupted.json").read_text() == "{}"
    assert (tmp_path / "core-1.txt").read_text().startswith("stored\n")
    assert "exit status -15 after" in capfd.readouterr().out
    assert "| core-1 | verdict | core-1-interrupted.json is damaged;" in tool.table(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(tool, "run_part", lambda folder, name, *_: asked.append(name))
    (tmp_path / "core-2.json").touch()
    tool.measure(tmp_path, ["core-1", "core-2"], 100, [])
    assert asked == ["core-1"]
    tool.measure(tmp_path, ["core-3"], 0.5, [])
    assert asked == ["core-1"], "no time for it"


@pytest.mark.parametrize("program", [SLEEPS, f"import signal; signal.signal(15, signal.SIG_IGN){SLEEPS}"])
def test_part_ends_with_the_tool_and_keeps_its_run(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """The second program does not end by itself, as a hung pytest."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                output = tmp_path / "core-1.txt"
                wait_until(lambda: output.read_text() == "stored\n", 30, output.read_text)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    monkeypatch.setattr(tool, "MOST_SECONDS_TO_SAVE", 0.5)
    with pytest.raises(KeyboardInterrupt):
        tool.run_part(tmp_path, "core-1", [sys.executable, "-c", program], 600)
    assert started[0].returncode == (-15 if program == SLEEPS else -9)
    assert {path.name for path in tmp_path.iterdir()} == {"core-1-interrupted.json", "core-1.txt"}


def test_run_of_another_process_is_not_taken_for_the_part(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another test run of the project ends meanwhile, and the part fails before it measures."""
    project, folder = tmp_path / "project", tmp_path / "folder"
    program = """
import pathlib, sys
for option in sys.argv[1:]:
    pathlib.Path(option.partition("=")[2]).touch()  # as pytest-benchmark does
other = pathlib.Path(".ddpperf/runs/key/0001_commit.json")
other.parent.mkdir(parents=True)
other.write_text("{}")
"""
    project.mkdir()
    folder.mkdir()
    monkeypatch.setattr(tool, "ROOT", project)
    tool.run_part(folder, "core-1", [sys.executable, "-c", program], 60)
    assert [path.name for path in folder.iterdir()] == ["core-1.txt"]


@pytest.mark.parametrize("own", [["--seconds", "5"], ["--only", "core-1"], []])
def test_options_after_two_dashes_reach_all_parts(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: list[str]
) -> None:
    measured = []
    monkeypatch.setattr(tool, "measure", lambda *arguments: measured.append(arguments[-1]))
    tool.main([str(tmp_path), *own, "--", "--device=cpu", "-k", "all_reduce"])
    tool.main([str(tmp_path), *own])
    assert measured == [["--device=cpu", "-k", "all_reduce"], []]


def test_sizes_that_nccl_tests_lack_are_left_out(tool: ModuleType, tmp_path: Path) -> None:
    shutil.copy(BASELINES / "0007_communication.json", tmp_path / "all_reduce.json")
    output = (REPOSITORY / "docs" / "nccl_tests" / "h200x2" / "2.txt").read_text()
    lines = (line for line in output.splitlines() if line.split()[:1] != ["1048576"])
    (tmp_path / "2.txt").write_text("\n".join(lines))
    table = tool.table(tmp_path)
    assert "| NCCL from torch over nccl-tests | 2 devices, 4MiB, eager |" in table
    assert "| NCCL from torch over nccl-tests | 2 devices, 1MiB, eager |" not in table


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", "all_reduce_perf cannot run (No such file or directory); check --nccl-tests"),
        ("#!/bin/sh\necho 'no GPU' >&2; exit 3\n", "-G 20 failed with 3:\nno GPU\n"),
    ],
)
def test_parts_are_measured_though_nccl_tests_fail(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    said: str,
) -> None:
    if program:
        (tmp_path / "all_reduce_perf").write_text(program)
        (tmp_path / "all_reduce_perf").chmod(0o755)
    parts: list[str] = []
    monkeypatch.setattr(tool, "run_part", lambda folder, name, *_: parts.append(name))
    tool.main([str(tmp_path), "--only=split", f"--nccl-tests={tmp_path}"])
    assert said in capsys.readouterr().out
    assert parts == ["split"]
    assert not list(tmp_path.glob("*.txt")), "the next call measures them again"


def test_unknown_part_is_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path / "new"), "--only", "core-1,splits"])
    assert "--only: unknown parts splits; the parts are core-1, core-2, " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_file_in_place_of_the_folder_is_refused(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        tool.main([str(tmp_path / "file"), "--only", ""])
    assert "file cannot be made (File exists); name another folder" in capsys.readouterr().err
