"""The hierarchical all-reduce over a slow link between nodes, beside a flat ring and gloo's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.namespaces import needs_namespaces
from tests.nodes.suite import run_on_nodes

MiB = 2**20
RATE = 1e9 / 8  # bytes per second between the nodes
OPTIONS = (
    *("perf/test_all_reduce.py::test_fastest_all_reduce", "--world-sizes=4"),
    *("--buffer-sizes=16MiB", "--rounds=9"),
)


@pytest.mark.figures
@needs_namespaces
def test_hierarchical_beats_a_ring_between_nodes(tmp_path: Path) -> None:
    """2 nodes of 2 ranks: the ring sends 1.5 times as many bytes over the link between the nodes."""
    stored, _ = run_on_nodes(
        tmp_path, OPTIONS, count=2, node_size=2, seconds=200, delay_seconds=1e-3, bytes_per_second=RATE
    )
    (test,) = stored["benchmarks"]
    metrics = test["extra_info"]["ddpperf"]["metrics"]
    hierarchical, ring = (metrics[f"{name}_over_backend"]["value"] for name in ("hierarchical", "ring"))
    assert hierarchical * test["stats"]["median"] > 16 * MiB / RATE  # the bytes that must leave each node
    assert ring / hierarchical >= 1.3, metrics
    assert hierarchical <= 1, metrics
