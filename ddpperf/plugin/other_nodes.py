"""The other nodes of a run: waits until their agents have joined, and describes the nodes for storage."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpperf.errors import Refused
from ddpperf.machine.hardware import Gpu
from ddpperf.node.defaults import KEY_FILE
from ddpperf.node.facts import facts, machine_id
from ddpperf.node.handshake import make_key, read_key
from ddpperf.node.joining import Joining
from ddpperf.node.ssh_agents import SshAgents
from ddpperf.plugin.options.options import Options
from ddpperf.plugin.progress import ProgressLine
from ddpperf.workers.process_set import Nodes


class OtherNodes:
    """Lets the agents of the other nodes join this process, and starts them if there is a hostfile.

    The constructor makes the key file if it does not exist, and begins to listen. Raises Refused if
    the key file cannot be used, the port is in use, or ssh cannot be started.
    """

    def __init__(self, options: Options, gpus: Sequence[Gpu]) -> None:
        self._options, hostfile = options.nodes, options.nodes.hostfile
        assert self._options.interface is not None
        self._interface = self._options.interface
        make_key(self._options.key)
        self._at_the_end: list[dict[str, Any]] | None = None
        self._joining = Joining(
            self._interface,
            self._options.port,
            read_key(self._options.key),
            count=self._options.count,
            expected=facts(options.device, gpus),
            welcome={
                "device": options.device,
                "ranks": self._options.size,
                "data": options.data_source,
                "machine": machine_id(),
            },
            digest=options.data.digest,
        )
        self._ssh = SshAgents()
        if hostfile is not None:
            try:
                self._ssh.start(hostfile.hosts, join=self._joining.address, key=self._options.key.read_text())
            except Refused:
                self.close()
                raise

    def wait(self, progress: ProgressLine) -> None:
        """Say how the other nodes join, and wait for them. Raises Refused if that takes too long."""
        waiting = f"ddpperf: waiting for {self._options.count - 1} of {self._options.count} nodes"
        if (hostfile := self._options.hostfile) is None:
            key = self._options.key
            of_key = "" if key == Path(KEY_FILE) else f" --key {shlex.quote(str(key.absolute()))}"
            progress.say(
                f"{waiting}; start there: python -m ddpperf.node --join {self._joining.address}{of_key}"
            )
            progress.say(
                f"  The agents read {key}, this run's key: share the folder, or copy the file there."
            )
        else:
            if hostfile.note:
                progress.say(f"ddpperf: {hostfile.note}")
            progress.say(f"{waiting}; ssh starts their agents")

        def show(line: str) -> None:
            if failures := self._ssh.failures():
                more = f", and {len(failures) - 1} more hosts failed" if len(failures) > 1 else ""
                raise Refused(f"{failures[0]}{more}")
            progress.show(line)

        try:
            self._joining.wait(self._options.seconds, show)
        except BaseException:
            self.close()
            raise
        progress.clear()

    def placement(self) -> Nodes:
        """Return where process sets start their ranks. Its list of nodes changes during the run."""
        return Nodes(
            others=self._joining.nodes,
            node_size=self._options.size,
            interface=self._interface.name,
            address=self._interface.address,
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return a description of each node for the stored run: this node, then the others in order.

        After `close`, the descriptions no longer change.
        """
        if self._at_the_end is not None:
            return self._at_the_end
        here = {"name": socket.gethostname(), "interface": self._interface.name, "link": self._interface.link}
        others = []
        for node in self._joining.nodes:
            clock = node.clock
            entry = {"name": node.name, "interface": node.hello["interface"], "lost": node.lost}
            if clock is not None:
                entry |= {
                    "clock_offset_seconds": clock.offset_seconds,
                    "clock_error_seconds": clock.error_seconds,
                    "round_trip_seconds": clock.round_trip_seconds,
                }
            others.append(entry)
        return [here | {"ranks": self._options.size}, *others]

    def close(self) -> None:
        """Tell all agents to end their ranks and then themselves. May be called again."""
        self._at_the_end = self.to_json()
        self._joining.close()
        self._ssh.close()
