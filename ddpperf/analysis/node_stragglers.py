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


def slow_node(
    measurements: Sequence[Sequence[Sequence[float]]], node_size: int, offset: float
) -> SlowNode | None:
    """Return the slowest node if it is slower than the fastest node by more than the noise.

    The input is seconds[measurement][round][rank], of steps in which no rank waits for another. In
    a synchronized step each rank waits for the last one, so its times are equal on all nodes and
    show no slow node. Nodes are compared by the mean over the measurements of the logarithm of
    their times.
    offset: the usual standard deviation by which all rounds of a measurement on one rank are longer
    or shorter, as a fraction.
    The difference must exceed two limits: that of Student's t for the error of the medians of all
    rounds, among all pairs of ranks, and that of the normal distribution for the offsets of the
    measurements, among all pairs of nodes (Bonferroni). Few measurements may agree by chance, so
    the offsets never count as smaller than the usual ones. A node that is slower by less than
    `LEAST_SLOWER` is never returned.
    """
    from scipy.stats import norm, t  # imported here because it takes 0.5 s

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
    nodes, n = len(means), len(found)
    within = math.hypot(*(error for of_nodes in errors for error in (of_nodes[node], of_nodes[fastest]))) / n
    between = max(stdev(found) if n > 1 else 0.0, math.sqrt(2) * offset) / math.sqrt(n)
    freedom = min(map(len, measurements)) - 1
    difference = mean(found)
    if difference <= max(
        math.log1p(LEAST_SLOWER),
        t.isf(MISTAKES / 2 / math.comb(nodes * node_size, 2), freedom) * within,
        norm.isf(MISTAKES / 2 / math.comb(nodes, 2)) * between,
    ):
        return None
    return SlowNode(node=node, fastest=fastest, slower=math.expm1(difference))
