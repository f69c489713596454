"""A controller in a process of its own: each line of its standard input is a command as JSON.

Run it in a network namespace: python -m tests.nodes.controlled FOLDER INTERFACE. It prints a line of
JSON for each answer, and for each command that it sends to the ranks. Times are of the machine's
monotonic clock, which namespaces have in common.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused
from ddpperf.machine.network import find_interface
from ddpperf.specs import AllReduceSpec, TrainingSpec
from ddpperf.workers.failures import NodeLost, SetFailure
from ddpperf.workers.pool import Pool
from ddpperf.workers.process_set import Nodes, SetOptions
from tests.faults.watched import watched_commands
from tests.nodes.joined import listen

SINGLE = TrainingSpec(world_size=1, per_rank_batch_size=2, strategy="single")


def report(**what: Any) -> None:
    print(json.dumps({**what, "time": time.monotonic()}), flush=True)


class Controller:
    """A run on several nodes of one rank each."""

    def __init__(self, folder: Path, interface: str, count: int) -> None:
        self.interface = find_interface(interface)
        self.joining = listen(folder, self.interface, count=count)
        self.count = count
        self.pool: Pool | None = None
        report(address=self.interface.address, port=self.joining.port)

    def wait(self, seconds: float) -> None:
        began = time.monotonic()
        self.joining.wait(seconds, lambda line: None)
        report(joined=time.monotonic() - began)

    def measure(self, ranks: int, rounds: int, deadline: float, fresh: bool) -> None:
        """Measure on so many nodes. fresh: with new process sets, and new options."""
        if fresh and self.pool is not None:
            self.pool.close()
        if fresh or self.pool is None:
            nodes = Nodes(
                others=self.joining.nodes,
                node_size=1,
                interface=self.interface.name,
                address=self.interface.address,
            )
            self.pool = Pool(
                SetOptions(
                    size=self.count, device="cpu", rounds=rounds, deadline_seconds=deadline, nodes=nodes
                )
            )
        spec = SINGLE if ranks == 1 else AllReduceSpec(world_size=ranks, nbytes=4096)
        try:
            (sample,) = self.pool.measure(spec).samples
            report(measured=[len(sample.seconds), *{len(round_) for round_ in sample.seconds}])
        except (SetFailure, NodeLost) as failure:
            report(failure=str(failure))

    def watch(self, seconds: float) -> None:
        """Wait until a rank or a node is lost, or all is over."""
        end = time.monotonic() + seconds
        sets = list(self.pool._sets.values()) if self.pool is not None else []
        while time.monotonic() < end:
            for live in sets:
                if live.alive and (dead := live.dead_ranks()):
                    return report(failure=f"rank {dead[0].rank}{dead[0].where} {dead[0].death().what}")
            for node in self.joining.nodes:
                if node.lost:
                    return report(failure=f"node {node.number} ({node.name}) was lost: {node.lost}")
            time.sleep(0.005)
        return report(failure="")

    def state(self) -> None:
        """Report how much this process holds, without ranks."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        fds = len(os.listdir("/proc/self/fd"))
        report(state={"fds": fds, "threads": threading.active_count(), "refused": [*self.joining.refused]})

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.joining.close()
        report(closed=True)


def main(folder: str, interface: str, count: str) -> None:
    controller = Controller(Path(folder), interface, int(count))
    with watched_commands(lambda command, process_set: report(at=command)):
        for line in sys.stdin:
            command, arguments = json.loads(line)
            try:
                getattr(controller, command)(**arguments)
            except Refused as refused:
                report(refused=str(refused))


if __name__ == "__main__":
    main(*sys.argv[1:])
