"""Stragglers by node: which node computes slowest, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TypeVar

from ddpperf.analysis.statistics import median_and_error

LEAST_SLOWER = 0.02  # equal GPUs differ by 1%, and new processes on one GPU by up to 0.7%
MISTAKES = 0.05  # the probability that nodes of equal speed are reported
Seconds = TypeVar("Seconds", float, tuple[float, float])


@dataclass(frozen=True, kw_only=True)
class SlowNode:
    """The slowest node of a run, compared with the fastest node.

    node, fastest: the numbers of the two nodes. slower: by which fraction the slowest node's times
    are longer.
    """

    node: int
    fastest: int
    slower: float


def node_seconds(ranks: Sequence[Seconds], node_size: int) -> list[Seconds]:
    """Return the seconds of each node, which are those of its slowest rank.

    ranks: the seconds of each rank, alone or each with its error. Consecutive `node_size` ranks are
    on one node. A synchronized step waits for the slowest rank, so that rank decides.
    """
    return [max(ranks[first : first + node_size]) for first in range(0, len(ranks), node_size)]


def slow_node(measurements: Sequence[Sequence[Sequence[float]]], node_size: int) -> SlowNode | None:
    """Return the slowest node if it is slower than the fastest node by more than the noise.

    The input is seconds[measurement][round][rank], of steps in which no rank waits for another. In
    a synchronized step each rank waits for the last one, so its times are equal on all nodes and
    show no slow node. Nodes are compared by the mean over the measurements of the logarithm of
    their times. The difference must exceed two limits by Student's t: the error of the medians of
    all rounds, and the error from the differences between several measurements. The limits allow
    for the choice among all pairs of ranks, and among all pairs of nodes (Bonferroni). One
    measurement does not show how much measurements differ. A node that is slower by less than
    `LEAST_SLOWER` is never returned.
    """
    from scipy.stats import t  # imported here because it takes 0.5 s

    times, errors = [], []  # [measurement][node]
    for rounds in measurements:
        ranks = [median_and_error(seconds) for seconds in zip(*rounds, strict=True)]
        slowest = node_seconds(ranks, node_size)
        times.append([math.log(seconds) for seconds, _ in slowest])
        errors.append([error / seconds for seconds, error in slowest])
    if not times or len(times[0]) < 2:
        return None
    means = [mean(of_node) for of_node in zip(*times, strict=True)]
    node, fastest = means.index(max(means)), means.index(min(means))
    found = [of_nodes[node] - of_nodes[fastest] for of_nodes in times]
    within = math.hypot(*(error for of_nodes in errors for error in (of_nodes[node], of_nodes[fastest])))
    between = stdev(found) * math.sqrt(len(found)) if len(found) > 1 else 0.0
    nodes, fewest = len(times[0]), min(map(len, measurements))
    limits = [math.log1p(LEAST_SLOWER)]
    for part, choices, freedom in ((within, nodes * node_size, fewest - 1), (between, nodes, len(found) - 1)):
        if freedom:
            limits.append(t.isf(MISTAKES / 2 / math.comb(choices, 2), freedom) * part / len(found))
    difference = mean(found)
    if difference <= max(limits):
        return None
    return SlowNode(node=node, fastest=fastest, slower=math.expm1(difference))
