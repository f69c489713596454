"""Write sentences on the nodes of a run: names, links, clocks and lost nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpperf.results import units

MOST_NAMED = 8  # nodes in one sentence


def node_facts(document: Mapping[str, Any]) -> list[str]:
    """Return sentences on the nodes of a stored run; none for a run on one node."""
    nodes: Sequence[Mapping[str, Any]] = document["ddpperf"]["environment"].get("nodes", [])
    if len(nodes) < 2:
        return []
    here = nodes[0]
    names = ", ".join(_name(number, nodes) for number in range(len(nodes))[:MOST_NAMED])
    more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
    link = (
        here["link"]
        if here["link"] == here["interface"]
        else f"{here['link']} (interface {here['interface']})"
    )
    ranks = f"{units.counted(here['ranks'], 'rank')} each"
    return [
        f"{names}{more}: {ranks}, connected by {link}; machine checks and energy are measured on node 0 only",
        *_clocks(nodes),
        *_lost(nodes),
    ]


def _name(number: int, nodes: Sequence[Mapping[str, Any]]) -> str:
    return f"node {number} ({nodes[number]['name']})"


def _clocks(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the node whose clock differs most from the clock of node 0."""
    known = [number for number, node in enumerate(nodes) if "clock_offset_seconds" in node]
    if not known:
        return []
    most = max(known, key=lambda number: abs(nodes[number]["clock_offset_seconds"]))
    offset, error = nodes[most]["clock_offset_seconds"], nodes[most]["clock_error_seconds"]
    which = "largest clock offset: " if len(known) > 1 else ""
    difference = f"{units.seconds(abs(offset))} {'ahead of' if offset > 0 else 'behind'} that of node 0"
    return [
        f"{which}the clock of {_name(most, nodes)} is {difference}, with an error of {units.seconds(error)}"
    ]


def _lost(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{_name(number, nodes)} was lost: {node['lost']}"
        for number, node in enumerate(nodes)
        if node.get("lost")
    ]
