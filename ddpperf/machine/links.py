"""The links between devices and between nodes, as the user's options describe them."""

from __future__ import annotations

from dataclasses import dataclass

from ddpperf.analysis.projection import Network


@dataclass(frozen=True, kw_only=True)
class Links:
    """The user's options about the links between devices and between nodes.

    bytes_per_second: between a device and the others of its node, or None if not given. node: the
    number of devices in a node. network: the network between nodes. project_to: the numbers of
    devices to project step times to. buffer_sizes: bytes per rank of collective calls. If it is
    empty, each experiment has its own default.
    """

    bytes_per_second: float | None = None
    node: int = 1
    network: Network | None = None
    project_to: tuple[int, ...] = ()
    buffer_sizes: tuple[int, ...] = ()
