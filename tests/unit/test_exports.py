"""The JSON of a run has what programs that read pytest-benchmark's JSON need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpperf.results.stored_runs import read_document
from tests.canned import CannedSuite

# What a test of plain pytest-benchmark looks like
PLAIN = "def test_plain(benchmark):\n    benchmark.pedantic(sum, args=([1, 2],), rounds=3)\n"

stored: Callable[[Path], dict[str, Any]] = read_document


@pytest.fixture
def ours(canned_suite: CannedSuite) -> dict[str, Any]:
    """Return the JSON that a run of ddpperf writes."""
    finished = canned_suite.run("perf", "--benchmark-json=ours.json")
    assert finished.status == 0, finished
    return stored(canned_suite.root / "ours.json")


def kinds(value: object) -> object:
    """Return the keys of a JSON object with the types of their values; a number is a number."""
    if isinstance(value, dict):
        return {key: kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return list
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def test_json_has_the_fields_of_pytest_benchmark(ours: dict[str, Any], tmp_path: Path) -> None:
    """So github-action-benchmark finds fullname, ops, stddev, mean and rounds, with its tool "pytest"."""
    (tmp_path / "test_plain.py").write_text(PLAIN)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--benchmark-json=plain.json"]
    # pytest-xdist's variables would disable the benchmark
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    plain = stored(tmp_path / "plain.json")
    assert plain.keys() <= ours.keys()
    expected, found = plain["benchmarks"][0], ours["benchmarks"][0]
    assert expected.keys() == found.keys()
    assert kinds(expected["stats"]) == kinds(found["stats"])
    assert ours["machine_info"].keys() >= {"node", "machine", "system", "python_version", "cpu"}
    assert plain["commit_info"].keys() - {"error"} <= ours["commit_info"].keys()
