"""Pin each rank to CPU cores near its GPU, and the controller process to other cores.

Step times are noisy if ranks share cores with other processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpperf.machine.gpu_description import Gpu
from ddpperf.machine.hardware import core_count
from ddpperf.results import units
from ddpperf.specs import Spec

MIN_CORES = 2  # for each rank, which has threads for the backward pass and communication, too
SYSTEM = Path("/sys/devices/system")

# NUMA nodes by number: the hyperthreads' core numbers of each physical core
Nodes = Mapping[int, Sequence[tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The CPU core numbers for the controller process and for each rank, without overlap."""

    controller: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


def numa_nodes(allowed: Iterable[int], system: Path = SYSTEM) -> Nodes:
    """Return the NUMA nodes of the allowed CPU cores, with the core numbers of each node.

    If the kernel lists no nodes, all cores belong to node 0.
    """
    left, siblings = set(allowed), "topology/thread_siblings_list"
    threads = [_listed(system / "cpu" / f"cpu{core}" / siblings) & left | {core} for core in left]
    cores = sorted({tuple(sorted(of_core)) for of_core in threads})
    nodes = {}
    for folder in (system / "node").glob("node[0-9]*"):
        listed = _listed(folder / "cpulist")
        if mine := [of_core for of_core in cores if of_core[0] in listed]:
            nodes[int(folder.name.removeprefix("node"))] = mine
    return dict(sorted(nodes.items())) or {0: cores}


def _listed(path: Path) -> set[int]:
    """Return the numbers in a kernel file such as "0-3,8", or an empty set if it cannot be read."""
    try:
        words = path.read_text(encoding="utf-8").strip().split(",")
    except OSError:
        return set()
    bounds = [word.split("-") for word in words if word]
    return {number for ends in bounds for number in range(int(ends[0]), int(ends[-1]) + 1)}


def share_cores(nodes: Nodes, rank_nodes: Sequence[int | None]) -> Plan | str:
    """Return a plan that gives each rank equally many neighbouring CPU cores.

    The ranks get as many whole physical cores as possible. rank_nodes: the NUMA node of each rank's
    GPU; if one is unknown, the ranks are spread over the nodes. The controller gets the first cores of
    the nodes, where the kernel works, too. Returns a sentence if there are too few cores.
    """
    if not set(rank_nodes) <= nodes.keys():
        chosen: list[int] = []
        for _ in rank_nodes:  # where most cores per rank are left
            chosen.append(max(nodes, key=lambda n: len(nodes[n]) / (chosen.count(n) + 1)))
        rank_nodes = sorted(chosen)  # neighbours in a ring stay neighbours
    homes = {node: [rank for rank, home in enumerate(rank_nodes) if home == node] for node in nodes}
    size = min(len(nodes[node]) // len(ranks) for node, ranks in homes.items() if ranks)
    if all(len(nodes[node]) == size * len(ranks) for node, ranks in homes.items()):
        size -= 1  # nothing would be left for the controller
    shares: dict[int, list[int]] = {}
    left: list[int] = []
    for node, cores in nodes.items():
        first = len(cores) - size * len(homes[node])
        left += (thread for core in cores[:first] for thread in core)
        for place, rank in enumerate(homes[node]):
            mine = cores[first + place * size : first + (place + 1) * size]
            shares[rank] = [thread for core in mine for thread in core]
    threads = min(map(len, shares.values()))  # some physical cores may have more hyperthreads than others
    if threads < MIN_CORES:
        found = sum(len(core) for cores in nodes.values() for core in cores)
        who = f"{units.counted(len(shares), 'rank')} and the controller"
        need = f"need {MIN_CORES * len(shares) + 1} cores, near their GPUs and in whole physical cores"
        return f"not pinned: {who} {need}, found {found}"
    ranks = tuple(tuple(sorted(shares[rank][:threads])) for rank in sorted(shares))
    return Plan(controller=tuple(sorted(left)), ranks=ranks)


class Pinning:
    """The CPU cores of the ranks on a node, near the GPU of each rank, and of the controller process.

    It is made before this process is pinned. world_size: the number of ranks on this node. gpus: the
    GPUs in the order of the ranks, which can be fewer than the ranks. ranks: the cores of each rank, or
    None if the ranks are not pinned.
    """

    def __init__(self, world_size: int, gpus: Sequence[Gpu]) -> None:
        self._core_count, self._allowed = core_count(), os.sched_getaffinity(0)
        rank_nodes = [*(gpu.numa_node for gpu in gpus), *[None] * world_size][:world_size]
        self._plan = share_cores(numa_nodes(self._allowed), rank_nodes)
        if self._core_count < len(self._allowed):
            quota = f"a quota of {self._core_count} of {len(self._allowed)} cores"
            self._plan = f"not pinned: the control group has {quota}, and no particular ones"
        self.ranks = None if isinstance(self._plan, str) else self._plan.ranks

    def hold(self) -> None:
        """Move this thread, and all that it starts later, to the controller's CPU cores."""
        if isinstance(self._plan, Plan):
            os.sched_setaffinity(0, self._plan.controller)

    def release(self) -> None:
        """Let the current thread use all CPU cores that it could use before it was pinned."""
        if isinstance(self._plan, Plan):
            os.sched_setaffinity(0, self._allowed)

    def environment(self) -> dict[str, Any]:
        """Return the choice of CPU cores as JSON values, to be stored with the test run."""
        return {"pinning": self._plan if isinstance(self._plan, str) else asdict(self._plan)}

    def warnings(self, spec: Spec, most_ranks: int | None = None) -> list[str]:
        """Return a warning if a measurement's processes on this node have to share CPU cores.

        most_ranks: the largest number of ranks on this node; None if all ranks are on this node. Process
        sets with more ranks than usual are not pinned.
        """
        busy_ranks = max(map(len, spec.turns(spec.world_size)))
        ranks_here = min(busy_ranks, most_ranks or busy_ranks)
        processes = ranks_here * (1 + getattr(spec, "loader_workers", 0))
        pinned = self.ranks is not None and ranks_here <= len(self.ranks)
        cores = ranks_here * len(self.ranks[0]) if self.ranks and pinned else self._core_count
        return [f"{processes} processes share {cores} cores"] if processes > cores else []
