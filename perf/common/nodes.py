"""Functions that store how the nodes of a run differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpperf.analysis.breakdown import straggler_spread
from ddpperf.plugin.measure_fixture import Measure
from perf.common.by_set import per_set


def node_spread(measure: Measure, by_rank: Mapping[str, Sequence[float]], world_size: int) -> None:
    """Store how much longer the slowest node's step is than the fastest node's, without waiting.

    Nothing is stored unless so many ranks are on several nodes. by_rank: the seconds of each rank by
    process set, of a step in which no rank waits for another. A synchronized step takes equally long
    on all ranks, so its times show no slow node.
    """
    complete = all(len(ranks) == world_size for ranks in by_rank.values())  # one device may be measured
    if measure.machine.crosses_nodes(world_size) and complete:
        size = measure.machine.links.node
        # A node's step takes as long as its slowest rank's; consecutive ranks share a node.
        nodes = {
            name: [max(ranks[first : first + size]) for first in range(0, world_size, size)]
            for name, ranks in by_rank.items()
        }
        measure.metric("node_spread", per_set(straggler_spread, nodes))
