"""Prints how long all-reduces take on 2 to 1,024 nodes, by a simulation of their messages.

    python tools/simulate_all_reduce.py --node-size 8 --buffer-size 64MiB \\
        --inside-latency 4e-6 --inside-bandwidth 400 --network-latency 1e-5 --network-bandwidth 50

Bandwidths are in GB/s in one direction. `test_cost_model` and `test_backend_model` measure them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ddpperf.analysis.all_reduce_simulation import ALGORITHMS, Cluster, finish_seconds
from ddpperf.analysis.two_links import Link
from ddpperf.plugin.options.declared import BANDWIDTH, BUFFER_SIZE, DELAY, LATENCY, WHOLE_NUMBER
from ddpperf.report.text import aligned
from ddpperf.results import units

NODES = [2**power for power in range(1, 11)]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="tools/simulate_all_reduce.py", description="Simulate all-reduces.")
    for name, kind, default, text in (
        ("--node-size", WHOLE_NUMBER, "8", "ranks per node"),
        ("--buffer-size", BUFFER_SIZE, "64MiB", "bytes per rank"),
        ("--inside-latency", LATENCY, "4e-6", "seconds of an empty message inside a node"),
        ("--inside-bandwidth", BANDWIDTH, "400", "GB/s of a rank to its node"),
        ("--network-latency", LATENCY, "1e-5", "seconds of an empty message between nodes"),
        ("--network-bandwidth", BANDWIDTH, "50", "GB/s of a node's network link"),
        ("--straggler", DELAY, None, "seconds by which the last rank starts later than the others"),
    ):
        shown = "none" if default is None else default
        parser.add_argument(name, type=kind, default=default, metavar=kind.metavar, help=f"{text} ({shown})")
    waits = "a message starts when its receiver is ready, as in gloo"
    parser.add_argument("--waits-for-receiver", action="store_true", help=waits)
    print("\n".join(table(parser.parse_args(arguments))))


def table(given: argparse.Namespace) -> list[str]:
    """Return the lines of a table with the time of each algorithm for each number of nodes."""
    rows = [("nodes", "ranks", *ALGORITHMS)]
    for nodes in NODES:
        ranks = nodes * given.node_size
        cluster = Cluster(
            nodes=nodes,
            ranks_per_node=given.node_size,
            inside=Link(latency=given.inside_latency, byte_seconds=1 / given.inside_bandwidth),
            between=Link(latency=given.network_latency, byte_seconds=1 / given.network_bandwidth),
            start_seconds={} if given.straggler is None else {ranks - 1: given.straggler},
            waits_for_receiver=given.waits_for_receiver,
        )
        times = [finish_seconds(algorithm, cluster, given.buffer_size).max() for algorithm in ALGORITHMS]
        rows.append((str(nodes), str(ranks), *map(units.seconds, times)))
    return aligned(rows, figures=range(len(rows[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
