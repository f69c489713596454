"""The JSON of a run has what programs that read pytest-benchmark's JSON need."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.canned import CannedSuite

# What a test of plain pytest-benchmark looks like
PLAIN = "def test_plain(benchmark):\n    benchmark.pedantic(sum, args=([1, 2],), rounds=3)\n"


def test_json_has_the_fields_of_pytest_benchmark(
    canned_suite: CannedSuite, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """So github-action-benchmark finds fullname, ops, stddev, mean and rounds, with its tool "pytest"."""
    assert canned_suite.run("perf", "--benchmark-json=ours.json").status == 0
    folder = tmp_path_factory.mktemp("plain")  # without ddpperf's plugin
    (folder / "test_plain.py").write_text(PLAIN)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--benchmark-json=plain.json"]
    # pytest-xdist's variables would disable the benchmark
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    plain = json.loads((folder / "plain.json").read_text())
    ours = json.loads((canned_suite.root / "ours.json").read_text())
    assert plain.keys() <= ours.keys()
    expected, found = plain["benchmarks"][0], ours["benchmarks"][0]
    assert expected.keys() == found.keys()
    assert expected["stats"].keys() == found["stats"].keys()
    assert ours["machine_info"].keys() >= {"node", "machine", "system", "python_version", "cpu"}
    assert plain["commit_info"].keys() - {"error"} <= ours["commit_info"].keys()
