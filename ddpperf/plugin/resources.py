"""What a run measures on: the locked devices of this node, and what starts ranks on several nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ddpperf.doctor.examination import run_findings
from ddpperf.doctor.findings import Finding
from ddpperf.machine.gpu_description import Gpu
from ddpperf.machine.network import find_interface
from ddpperf.plugin.devices import Devices
from ddpperf.plugin.options.options import Options
from ddpperf.workers.interpreter import LOOPBACK
from ddpperf.workers.launcher import Launcher


class Resources:
    """The devices of this node and the launcher of ranks, from the first measurement to the end of a run.

    devices: the devices of this node.
    launcher: what starts the ranks, or None if they start on this machine.
    machine_findings: what may spoil the measurements, as the doctor found before the first one.
    cleanup: releases the devices, and removes what else the run made for its processes. It is closed
    when all processes have ended.
    """

    def __init__(self, options: Options, gpus: Sequence[Gpu]) -> None:
        most, several = max(options.world_sizes), options.nodes.count > 1
        self.devices = Devices(
            gpus if options.device == "cuda" else (),
            min(most, options.nodes.size) if several else most,
            several_nodes=several,
        )
        self.launcher: Launcher | None = None
        self.machine_findings: list[Finding] = []
        self.cleanup = ExitStack()
        self._gpus = gpus

    def acquire(self, options: Options) -> None:
        """Lock the devices, prepare the launcher, and check this machine.

        Raises Refused if another test run uses one of the devices.
        """
        self.cleanup.callback(self.devices.release)
        self.devices.acquire()
        nodes = options.nodes
        if nodes.launcher is not None:
            self.launcher = Launcher(
                nodes.launcher,
                nodes=nodes.count,
                per_node=nodes.size if nodes.count > 1 else max(options.world_sizes),
                device=options.device,
                interface=nodes.interface or find_interface(LOOPBACK),
                images=str(options.data.path.absolute()) if options.data.path is not None else "",
                key_file=Path(f".ddpperf/launch-{os.getpid()}.key"),
            )
            self.cleanup.callback(self.launcher.close)
        self.machine_findings = run_findings(options.device, self._gpus)

    def environment(self) -> dict[str, Any]:
        """Return the nodes of a run on several nodes, as stored in the JSON file of the run."""
        if self.launcher is None or self.launcher.nodes == 1:
            return {}
        here = {"link": self.launcher.interface.link, "ranks": self.launcher.per_node}
        return {"nodes": [node | here for node in self.launcher.hosts]}
