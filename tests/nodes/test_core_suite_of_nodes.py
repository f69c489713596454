"""The whole core suite on several nodes, each a network namespace with one rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.namespaces import INTERFACE, needs_namespaces, nodes
from tests.project import REPOSITORY

SUITE_SECONDS = 600
AGENT_SECONDS = 20


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("count", [2, 4])
def test_core_suite_passes_on_nodes(count: int, tmp_path: Path) -> None:
    key, report = tmp_path / "node.key", tmp_path / "run.json"
    python = [sys.executable, "-m"]
    options = ["--nodes", str(count), "--node-size=1", f"--interface={INTERFACE}", f"--node-key={key}"]
    with nodes(count, delay_seconds=1e-4, bytes_per_second=1e9 / 8) as made:
        agents = [
            made.start(
                node,
                [
                    *python,
                    "ddpperf.node",
                    "--join",
                    f"{made.addresses[0]}:29511",
                    "--key",
                    str(key),
                    "--name",
                    f"node{node}",
                ],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for node in range(1, count)
        ]
        suite = made.start(
            0,
            [*python, "pytest", "perf/", *options, "--rounds=2", f"--benchmark-json={report}"],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = suite.communicate(timeout=SUITE_SECONDS)
        assert suite.returncode == 0, output
        assert "PASS: " in output
        for agent in agents:
            said, _ = agent.communicate(timeout=AGENT_SECONDS)
            assert agent.returncode == 0, said
            assert said.endswith("ddpperf.node: the run has ended\n")
    stored = json.loads(report.read_text())
    assert [node["name"] for node in stored["ddpperf"]["environment"]["nodes"][1:]] == sorted(
        f"node{node}" for node in range(1, count)
    )
    names = [test["name"] for test in stored["benchmarks"]]
    assert f"test_weak_scaling[{count}x1rank-b32]" in names
