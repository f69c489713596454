"""The other nodes of a run: waiting for their agents, and what is stored of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from ddpperf.errors import Refused
from ddpperf.machine.hardware import Gpu
from ddpperf.node.facts import facts, machine_id
from ddpperf.node.handshake import make_key, read_key
from ddpperf.node.joining import Joining
from ddpperf.node.ssh_agents import SshAgents
from ddpperf.plugin.options.options import Options
from ddpperf.plugin.progress import ProgressLine
from ddpperf.workers.process_set import Nodes


class OtherNodes:
    """The nodes of a run whose agents join this process.

    Raises Refused if the key file cannot be used, or the port is in use.
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
                self._ssh.start(hostfile.hosts, join=self._address, key=self._options.key.read_text())
            except Refused:
                self.close()
                raise

    def wait(self, progress: ProgressLine) -> None:
        """Wait until all nodes have joined. Raises Refused if that takes too long."""
        hostfile = self._options.hostfile
        how = f"start there: python -m ddpperf.node --join {self._address}"
        if hostfile is not None:
            how = "ssh starts their agents"
            if hostfile.note:
                progress.say(f"ddpperf: {hostfile.note}")
        progress.say(f"ddpperf: waiting for {self._options.count - 1} of {self._options.count} nodes; {how}")

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
        """Return where the ranks of process sets run. The list of the nodes grows and shrinks."""
        return Nodes(
            others=self._joining.nodes,
            node_size=self._options.size,
            interface=self._interface.name,
            address=self._interface.address,
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return the nodes as they are stored: this node first, then the others by their number.

        After the run has ended, these are the nodes at its end.
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
        """Let all agents end their ranks and themselves. May be called again."""
        self._at_the_end = self.to_json()
        self._joining.close()
        self._ssh.close()

    @property
    def _address(self) -> str:
        """The HOST:PORT that agents join."""
        address = self._interface.address
        return f"[{address}]:{self._joining.port}" if ":" in address else f"{address}:{self._joining.port}"
