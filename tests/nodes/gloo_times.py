"""Measure gloo's all-reduce between nodes of one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.namespaces import INTERFACE, nodes

Times = dict[tuple[int, int], float]  # seconds, by nodes and bytes
RANK = Path(__file__).with_name("all_reduce_rank.py")


def gloo_times(
    count: int, sizes: Sequence[int], rounds: int, *, delay_seconds: float, bytes_per_second: float
) -> Times:
    """Return the median seconds of all-reduces by (nodes, bytes)."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
    with nodes(count, delay_seconds=delay_seconds, bytes_per_second=bytes_per_second) as made:
        ranks = []
        for rank in range(count):
            numbers = [rank, count, made.addresses[0], rounds, *sizes]
            command = [sys.executable, str(RANK), *map(str, numbers)]
            ranks.append(made.start(rank, command, env=environment, stdout=subprocess.PIPE))
        output = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    return {(count, int(size)): median(times) for size, times in json.loads(output[0]).items()}
