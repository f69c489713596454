"""The hierarchical all-reduce over a slow link between nodes, beside a flat ring and gloo's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.namespaces import INTERFACE, needs_namespaces, nodes

RANK = Path(__file__).with_name("algorithms_rank.py")
MiB = 2**20


def medians(
    node_count: int, node_size: int, *sizes: int, delay_seconds: float, bytes_per_second: float, rounds: int
) -> dict[tuple[str, int], float]:
    """Return the median seconds of all-reduces by algorithm and bytes."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": os.pathsep.join(sys.path)}
    world_size = node_count * node_size
    with nodes(node_count, delay_seconds=delay_seconds, bytes_per_second=bytes_per_second) as made:
        ranks = []
        for rank in range(world_size):
            numbers = [rank, world_size, node_size, made.addresses[0], rounds, *sizes]
            command = [sys.executable, str(RANK), *map(str, numbers)]
            node = rank // node_size
            ranks.append(made.start(node, command, env=environment, stdout=subprocess.PIPE))
        output = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size
    return {(name, size): median(times) for name, size, times in json.loads(output[0])}


@pytest.mark.figures
@needs_namespaces
def test_hierarchical_beats_a_ring_between_nodes() -> None:
    """2 nodes of 2 ranks: the ring sends 1.5 times as many bytes over the link between the nodes."""
    found = medians(2, 2, 16 * MiB, delay_seconds=1e-3, bytes_per_second=1e9 / 8, rounds=9)
    seconds = {name: t for (name, _), t in found.items()}
    assert seconds["hierarchical"] > 16 * MiB / (1e9 / 8)  # the bytes that must leave each node
    assert seconds["ring"] / seconds["hierarchical"] >= 1.3, seconds
    assert seconds["hierarchical"] <= seconds["backend"], seconds
