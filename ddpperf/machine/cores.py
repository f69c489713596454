"""Cores of its own for each rank, near its GPU, and others for the controller: a rank that moves, or shares one, is noise."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpperf.machine.hardware import Gpu, core_count
from ddpperf.specs import Spec

LEAST_CORES = (
    2  # a rank has a backward thread, communication threads and loader processes beside its main thread
)
SYSTEM = Path("/sys/devices/system")

Nodes = Mapping[
    int, Sequence[tuple[int, ...]]
]  # by its number, a NUMA node's physical cores: the numbers of their threads


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of the cores that the controller and each rank have to themselves."""

    controller: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


def numa_nodes(allowed: Iterable[int], system: Path = SYSTEM) -> Nodes:
    """The NUMA nodes that the cores `allowed` lie in; a machine that does not tell is one node, of cores without siblings."""
    left = set(allowed)
    cores = {}
    for core in sorted(left):
        siblings = _listed(system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list") & left | {
            core
        }
        if core == min(siblings):
            cores[core] = tuple(sorted(siblings))
    folders = sorted(
        (system / "node").glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node"))
    )
    nodes = {}
    for folder in folders:
        listed = _listed(folder / "cpulist")
        if mine := [threads for core, threads in cores.items() if core in listed]:
            nodes[int(folder.name.removeprefix("node"))] = mine
    return nodes or {0: list(cores.values())}


def _listed(path: Path) -> set[int]:
    """The numbers in a list of the kernel's, such as "0-3,8"; none where it cannot be read."""
    try:
        words = path.read_text().strip().split(",")
    except OSError:
        return set()
    bounds = [word.split("-") for word in words if word]
    return {number for each in bounds for number in range(int(each[0]), int(each[-1]) + 1)}


def share_cores(nodes: Nodes, rank_nodes: Sequence[int | None]) -> Plan | str:
    """Neighbouring cores for each rank in its node, for all equally many and as many as there are; or why not, a sentence.

    rank_nodes: by rank, the NUMA node of its GPU; the ranks that have none, or one without cores, are spread over the nodes.
    No physical core is split between two ranks, or a rank and the controller, unless a rank had fewer than `LEAST_CORES` then.
    The controller has what is left: a node's first cores, where the kernel's own work is too.
    """
    homes = _homes(nodes, rank_nodes)
    found = sum(map(_count, nodes.values()))
    threads = {node: [(thread,) for core in cores for thread in core] for node, cores in nodes.items()}
    for units in (nodes, threads):
        for size in range(found // len(rank_nodes), LEAST_CORES - 1, -1):
            if (shared := _share(units, homes, size)) is not None:
                return shared
    if found <= LEAST_CORES * len(rank_nodes):
        who = f"{_ranks(len(rank_nodes))} and the controller"
        return f"not pinned: {who} need {LEAST_CORES * len(rank_nodes) + 1} cores, found {found}"
    needed = {node: LEAST_CORES * len(ranks) for node, ranks in homes.items()}
    crowded = next(node for node in nodes if _count(nodes[node]) < needed[node])
    where = f"{_ranks(len(homes[crowded]))} on NUMA node {crowded}"
    return f"not pinned: {where} must have {needed[crowded]} cores, found {_count(nodes[crowded])}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _count(cores: Sequence[tuple[int, ...]]) -> int:
    return sum(map(len, cores))


def _homes(nodes: Nodes, rank_nodes: Sequence[int | None]) -> dict[int, list[int]]:
    """The ranks of each node; one of no known node comes to where most cores are left for each."""
    homes = {node: [rank for rank, home in enumerate(rank_nodes) if home == node] for node in nodes}
    homeless = [rank for rank, home in enumerate(rank_nodes) if home not in nodes]
    chosen: list[int] = []
    for _ in homeless:
        chosen.append(
            max(nodes, key=lambda node: _count(nodes[node]) / (len(homes[node]) + chosen.count(node) + 1))
        )
    for rank, node in zip(homeless, sorted(chosen), strict=True):  # neighbours in a ring stay neighbours
        homes[node].append(rank)
    return {node: sorted(ranks) for node, ranks in homes.items()}


def _share(units: Nodes, homes: Mapping[int, Sequence[int]], size: int) -> Plan | None:
    """`size` cores for each rank, from the end of its node, in whole units; None if there are too few, or none is left."""
    ranks: dict[int, tuple[int, ...]] = {}
    left: list[int] = []
    for node, unused in ((node, list(cores)) for node, cores in units.items()):
        for rank in reversed(homes[node]):
            mine: list[int] = []
            while len(mine) < size and unused:
                mine += unused.pop()
            if len(mine) < size:
                return None
            ranks[rank] = tuple(sorted(mine[:size]))
        left += (thread for core in unused for thread in core)
    return (
        Plan(controller=tuple(sorted(left)), ranks=tuple(ranks[rank] for rank in sorted(ranks)))
        if left
        else None
    )


class Pinning:
    """What a run does with cores: nothing before `plan`; then `hold` puts this process on its own ones, until `release`.

    ranks: each rank's cores, None where nothing is pinned. `plan` is for a process that the ranks are not started from yet.
    """

    def __init__(self) -> None:
        self.ranks: tuple[tuple[int, ...], ...] | None = None
        self._allowed = os.sched_getaffinity(0)
        self._core_count = core_count()  # now: this process will have fewer
        self._plan: Plan | str = "not pinned: no process set was started"

    def plan(self, world_size: int, gpus: Sequence[Gpu]) -> None:
        """Plan for `world_size` ranks, the first of which have these GPUs."""
        if self._core_count < len(self._allowed):
            quota = f"a quota of {self._core_count} of {len(self._allowed)} cores"
            self._plan = f"not pinned: the control group has {quota}, and no particular ones"
            return
        rank_nodes = [*(gpu.numa_node for gpu in gpus), *[None] * world_size][:world_size]
        self._plan = share_cores(numa_nodes(self._allowed), rank_nodes)
        if isinstance(self._plan, Plan):
            self._plan = self._refusal(self._plan) or self._plan
        self.ranks = None if isinstance(self._plan, str) else self._plan.ranks

    def _refusal(self, plan: Plan) -> str | None:
        """Why the kernel does not let a process have its cores, tried with this one: a rank that failed would end a test."""
        try:
            for cores in (*plan.ranks, plan.controller):
                os.sched_setaffinity(0, cores)
                if os.sched_getaffinity(0) != set(cores):
                    return f"not pinned: of the cores {_names(cores)} the kernel gives {_names(os.sched_getaffinity(0))}"
        except OSError as error:
            return f"not pinned: the kernel refuses the cores {_names(cores)}: {error.strerror}"
        finally:
            self.release()
        return None

    def hold(self) -> None:
        """Keep this thread, and those that it starts, off the ranks' cores."""
        if isinstance(self._plan, Plan):
            with contextlib.suppress(OSError):  # it could be had before, and the ranks are there already
                os.sched_setaffinity(0, self._plan.controller)

    def release(self) -> None:
        """Give this thread back the cores that it had."""
        if isinstance(self._plan, Plan):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._allowed)

    def environment(self) -> dict[str, Any]:
        """The plan as the JSON has it."""
        return {"pinning": self._plan if isinstance(self._plan, str) else asdict(self._plan)}

    def warnings(self, spec: Spec) -> list[str]:
        """Whether more processes compute than the ranks that do so have cores; of all of the machine's if nothing is pinned."""
        busy_ranks = max(map(len, spec.turns(spec.world_size)))
        cores = self._core_count if self.ranks is None else busy_ranks * len(self.ranks[0])
        crowded = spec.busy_processes > cores
        return [f"{spec.busy_processes} processes share {cores} cores"] if crowded else []


def _names(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
