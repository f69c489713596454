"""The traces of all ranks joined into one file for Perfetto."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpperf.report.perfetto import PIDS_PER_RANK, joined, read_traces
from tests.project import REPOSITORY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the traces of two ranks on two H200 GPUs."""
    folder = tmp_path_factory.mktemp("traces")
    for packed in (REPOSITORY / "tests" / "traces").glob("*-rank*.json.gz"):
        name = packed.name.rpartition("-")[2].removesuffix(".gz")
        (folder / name).write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="module")
def events(folder: Path) -> list[dict[str, Any]]:
    return list(joined(read_traces(folder))["traceEvents"])


def rank_of(event: dict[str, Any]) -> int:
    pid = event["pid"]
    return int(pid) // PIDS_PER_RANK if isinstance(pid, int) else int(pid.split()[1])


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ddpperf.report.perfetto", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True)


def test_joined_traces_keep_every_event(folder: Path, events: list[dict[str, Any]]) -> None:
    traces = read_traces(folder)
    assert sorted(traces) == [0, 1]
    for rank, trace in traces.items():
        expected = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        found = [event for event in events if event["ph"] == "X" and rank_of(event) == rank]
        assert [event["name"] for event in found] == [event["name"] for event in expected]
        assert [event["dur"] for event in found] == [event["dur"] for event in expected]


def test_joined_traces_have_one_clock() -> None:
    event = {"name": "step", "ph": "X", "pid": 7, "tid": 1, "ts": 5.0, "dur": 1.0}
    traces = {
        0: {"baseTimeNanoseconds": 1_000_000, "traceEvents": [event]},
        1: {"baseTimeNanoseconds": 3_000_000, "traceEvents": [event]},
    }
    first, second = joined(traces)["traceEvents"]
    assert (first["ts"], second["ts"]) == (5.0, 2005.0)
    assert first["pid"] != second["pid"]


def test_arrows_stay_within_a_rank(events: list[dict[str, Any]]) -> None:
    ends: dict[int, set[int]] = {}
    for event in events:
        if event["ph"] in "sf":
            assert isinstance(event["id"], int), "Perfetto reads other ids as hexadecimal numbers"
            ends.setdefault(event["id"], set()).add(rank_of(event))
    assert len(ends) > 50
    assert all(len(ranks) == 1 for ranks in ends.values())


def test_joined_traces_name_only_used_processes(events: list[dict[str, Any]]) -> None:
    named = {event["pid"] for event in events if event.get("name") == "process_name"}
    used = {event["pid"] for event in events if event["ph"] != "M"}
    assert named <= used


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "holds no file such as rank0.json; name one of the folders that --traces made"),
        ("{", "rank0.json is no trace ("),
        ("{}", "rank0.json is no trace ("),
        ("[]", "rank0.json is no trace ("),
        ('{"traceEvents": [1]}', "rank0.json is no trace ("),
        ("[" * 100_000, "rank0.json is no trace ("),
        ('{"traceEvents": [{"ts": "a", "pid": 1}]}', " is damaged ("),
        ('{"traceEvents": [], "baseTimeNanoseconds": null}', " is damaged ("),
    ],
)
def test_damaged_trace_is_one_sentence(tmp_path: Path, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "rank0.json").write_text(content)
    ended = command(tmp_path)
    assert ended.returncode == 4
    assert sentence in ended.stderr, ended
    assert ended.stderr.count("\n") == 1


def test_missing_rank_is_one_sentence(tmp_path: Path) -> None:
    for rank in (0, 2):
        (tmp_path / f"rank{rank}.json").write_text('{"traceEvents": []}')
    ended = command(tmp_path)
    assert (ended.returncode, ended.stderr) == (
        4, f"{tmp_path} lacks rank1.json; copy the traces of all ranks\n"
    )  # fmt: skip


def test_fifo_is_no_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.json")
    assert "is no trace" in command(tmp_path).stderr


def test_command_joins_the_traces(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "all.json"
    for _ in range(2):
        ended = command(folder, "-o", output)
        assert ended.stdout == f"saved {output}: open it in ui.perfetto.dev\n", ended.stderr
    assert len(json.loads(output.read_text())["traceEvents"]) > 9000
    output.write_text("mine")
    assert command(folder, "-o", output).returncode == 4
    assert output.read_text() == "mine"
