"""Pin each rank to CPU cores near its GPU, and the controller process to other cores.

Step times are noisy if ranks share cores with other processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpperf.machine.gpu_description import Gpu
from ddpperf.machine.hardware import core_count
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
    left = set(allowed)
    cores = {}
    for core in sorted(left):
        listed = _listed(system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list")
        siblings = listed & left | {core}
        if core == min(siblings):
            cores[core] = tuple(sorted(siblings))
    nodes = {}
    for folder in (system / "node").glob("node[0-9]*"):
        listed = _listed(folder / "cpulist")
        if mine := [threads for core, threads in cores.items() if core in listed]:
            nodes[int(folder.name.removeprefix("node"))] = mine
    return dict(sorted(nodes.items())) or {0: list(cores.values())}


def _listed(path: Path) -> set[int]:
    """Return the numbers in a kernel file such as "0-3,8", or an empty set if it cannot be read."""
    try:
        words = path.read_text().strip().split(",")
    except OSError:
        return set()
    bounds = [word.split("-") for word in words if word]
    return {number for ends in bounds for number in range(int(ends[0]), int(ends[-1]) + 1)}


def share_cores(nodes: Nodes, rank_nodes: Sequence[int | None]) -> Plan | str:
    """Return a plan that gives each rank equally many neighbouring CPU cores.

    The ranks get as many cores as possible. rank_nodes: the NUMA node of each rank's GPU. Ranks
    without a node are spread over the nodes. Processes share no physical core. The controller gets the
    first cores of the nodes, where the kernel works, too. Returns a sentence if there are too few cores.
    """
    homes, count = _homes(nodes, rank_nodes), len(rank_nodes)
    found = sum(map(_count, nodes.values()))
    for size in range(found // count, MIN_CORES - 1, -1):
        if (shared := _share(nodes, homes, size)) is not None:
            return shared
    who = f"{count} rank{'s' * (count != 1)} and the controller need {MIN_CORES * count + 1} cores"
    return f"not pinned: {who}, near their GPUs and in whole physical cores, found {found}"


def _count(cores: Sequence[tuple[int, ...]]) -> int:
    return sum(map(len, cores))


def _homes(nodes: Nodes, rank_nodes: Sequence[int | None]) -> dict[int, list[int]]:
    """Return the ranks of each NUMA node. Ranks without a node go where most cores per rank are left."""
    homes = {node: [rank for rank, home in enumerate(rank_nodes) if home == node] for node in nodes}
    homeless = [rank for rank, home in enumerate(rank_nodes) if home not in nodes]
    ranks_at = {node: len(ranks) for node, ranks in homes.items()}
    chosen: list[int] = []
    for _ in homeless:
        chosen.append(max(nodes, key=lambda node: _count(nodes[node]) / (ranks_at[node] + 1)))
        ranks_at[chosen[-1]] += 1
    for rank, node in zip(homeless, sorted(chosen), strict=True):  # neighbours in a ring stay neighbours
        homes[node].append(rank)
    return {node: sorted(ranks) for node, ranks in homes.items()}


def _share(nodes: Nodes, homes: Mapping[int, Sequence[int]], size: int) -> Plan | None:
    """Give each rank `size` cores of its NUMA node, or return None if a node has too few cores."""
    ranks: dict[int, tuple[int, ...]] = {}
    left: list[int] = []
    for node, cores in nodes.items():
        unused = list(cores)  # ranks get the last ones, the controller the rest
        for rank in reversed(homes[node]):
            mine: list[int] = []
            while len(mine) < size and unused:
                mine += unused.pop()
            if len(mine) < size:
                return None
            ranks[rank] = tuple(sorted(mine[:size]))
        left += (thread for core in unused for thread in core)
    if not left:
        return None
    return Plan(controller=tuple(sorted(left)), ranks=tuple(ranks[rank] for rank in sorted(ranks)))


class Pinning:
    """Chooses the CPU cores of a test run's ranks and of its controller process.

    `plan` is called before the ranks start. ranks: the cores of each rank, or None if the ranks are
    not pinned.
    """

    def __init__(self) -> None:
        self.ranks: tuple[tuple[int, ...], ...] | None = None
        self._allowed = os.sched_getaffinity(0)
        self._core_count = core_count()  # before this process is pinned
        self._plan: Plan | str = "not pinned: no process set was started"

    def plan(self, world_size: int, gpus: Sequence[Gpu]) -> None:
        """Choose CPU cores for `world_size` ranks, near the GPU of each rank.

        gpus: the GPUs in the order of the ranks, which can be fewer than the ranks.
        """
        if self._core_count < len(self._allowed):
            quota = f"a quota of {self._core_count} of {len(self._allowed)} cores"
            self._plan = f"not pinned: the control group has {quota}, and no particular ones"
            return
        rank_nodes = [*(gpu.numa_node for gpu in gpus), *[None] * world_size][:world_size]
        self._plan = share_cores(numa_nodes(self._allowed), rank_nodes)
        if isinstance(self._plan, Plan):
            self._plan = self._try(self._plan)
        self.ranks = None if isinstance(self._plan, str) else self._plan.ranks

    def _try(self, plan: Plan) -> Plan | str:
        """Return the plan, or the reason why the kernel does not grant its CPU cores."""
        try:
            for cores in (*plan.ranks, plan.controller):
                os.sched_setaffinity(0, cores)
                if (found := os.sched_getaffinity(0)) != set(cores):
                    return f"not pinned: of the cores {_names(cores)} the kernel gives {_names(found)}"
        except OSError as error:
            return f"not pinned: the kernel refuses the cores {_names(cores)}: {error.strerror}"
        finally:
            self.release()
        return plan

    def hold(self) -> None:
        """Move this thread, and all that it starts later, to the controller's CPU cores."""
        if isinstance(self._plan, Plan):
            with contextlib.suppress(OSError):  # `plan` has tried it; the ranks run already
                os.sched_setaffinity(0, self._plan.controller)

    def release(self) -> None:
        """Let the current thread use all CPU cores that it could use before it was pinned."""
        if isinstance(self._plan, Plan):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._allowed)

    def environment(self) -> dict[str, Any]:
        """Return the choice of CPU cores as JSON values, to be stored with the test run."""
        return {"pinning": self._plan if isinstance(self._plan, str) else asdict(self._plan)}

    def warnings(self, spec: Spec, most_ranks: int | None = None) -> list[str]:
        """Return a warning if a measurement's processes have to share CPU cores.

        most_ranks: the largest number of ranks on this node; None if all ranks are on this node.
        """
        busy_ranks = max(map(len, spec.turns(spec.world_size)))
        ranks_here = min(busy_ranks, most_ranks or busy_ranks)
        processes = spec.busy_processes // busy_ranks * ranks_here
        pinned = self.ranks is not None and ranks_here <= len(self.ranks)
        cores = ranks_here * len(self.ranks[0]) if self.ranks and pinned else self._core_count
        return [f"{processes} processes share {cores} cores"] if processes > cores else []


def _names(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
