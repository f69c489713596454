"""The whole core suite on several nodes, each a network namespace with one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.namespaces import needs_namespaces
from tests.nodes.suite import run_on_nodes

SUITE_SECONDS = 600


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("count", [2, 4])
def test_core_suite_passes_on_nodes(count: int, tmp_path: Path) -> None:
    stored, output = run_on_nodes(
        tmp_path,
        ["perf/", "--rounds=2"],
        count=count,
        node_size=1,
        seconds=SUITE_SECONDS,
        delay_seconds=1e-4,
        bytes_per_second=1e9 / 8,
    )
    assert "PASS: " in output
    assert len(stored["ddpperf"]["environment"]["nodes"]) == count
    names = [test["name"] for test in stored["benchmarks"]]
    assert f"test_weak_scaling[{count}x1rank-b32]" in names
