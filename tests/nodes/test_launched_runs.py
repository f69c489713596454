"""Runs on several nodes by a launcher and by agents, each node a network namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import needs_namespaces
from tests.nodes.suite import run_on_nodes

WORDS = ("perf/test_all_reduce.py", "perf/test_scaling.py", "--rounds=2", "--buffer-sizes=64KiB")


def metrics_by_test(stored: dict[str, Any]) -> dict[str, set[str]]:
    return {test["fullname"]: set(test["extra_info"]["ddpperf"]["metrics"]) for test in stored["benchmarks"]}


@pytest.mark.slow
@needs_namespaces
def test_launcher_and_agents_measure_the_same(tmp_path: Path) -> None:
    found = []
    for launched in (False, True):
        (folder := tmp_path / str(launched)).mkdir()
        stored, _ = run_on_nodes(folder, WORDS, count=2, node_size=1, seconds=300, launched=launched)
        found.append(metrics_by_test(stored))
        nodes = stored["ddpperf"]["environment"]["nodes"]
        assert [node["interface"] for node in nodes] == ["eth0", "eth0"]
    assert found[0] == found[1]
