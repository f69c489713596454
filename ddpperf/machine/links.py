"""The links between devices and between nodes, as the user describes them."""

from __future__ import annotations

from dataclasses import dataclass

from ddpperf.analysis.projection import Network


@dataclass(frozen=True, kw_only=True)
class Links:
    """The user's options about links, and what is computed from them.

    bytes_per_second: between a device and the others of its node, None if not given. node: devices
    in a node. network: between nodes. project_to: numbers of devices. buffer_sizes: bytes per rank
    of collectives, empty for each experiment's default.
    """

    bytes_per_second: float | None = None
    node: int = 1
    network: Network | None = None
    project_to: tuple[int, ...] = ()
    buffer_sizes: tuple[int, ...] = ()
