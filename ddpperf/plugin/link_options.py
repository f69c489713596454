"""What the user says of the links between devices and nodes, and for how many devices a step is to be projected."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ddpperf.analysis.projection import Network
from ddpperf.plugin.option_values import MAX_WORLD_SIZE, positive, seconds, sizes, whole_number

MOST_GIGABYTES_PER_SECOND = 10**5


@dataclass(frozen=True, kw_only=True)
class Links:
    """bytes_per_second: between a device and the others of its node, None if it is not given. node: a node's devices. network:
    between nodes. project_to: numbers of devices."""

    bytes_per_second: float | None = None
    node: int = 1
    network: Network | None = None
    project_to: tuple[int, ...] = ()


def add_link_options(group: pytest.OptionGroup) -> None:
    for name, metavar, text in (
        ("--link-bandwidth", "GB/S", "between a device and the others, in one direction (default: what the driver says)"),
        ("--project-to", "N,N", "numbers of devices for which test_projection says what a step's excess would be"),
        ("--node-size", "N", "devices of a node, for --project-to (default: the most of this run)"),
        ("--node-latency", "SECONDS", "of a message between nodes, for --project-to beyond one"),
        ("--node-bandwidth", "GB/S", "between nodes, of each device, in one direction"),
    ):
        group.addoption(name, default=None, metavar=metavar, help=text)


def read_links(config: pytest.Config, most: int) -> Links:
    """most: devices of this run. Raises pytest.UsageError for a number that is none, a projection to one device, a node of
    fewer devices than this run's, or devices beyond a node's without what lies between nodes."""
    size = config.getoption("node_size")
    node = most if size is None else whole_number("--node-size", size)
    if node < most:
        raise pytest.UsageError(f"--node-size {node} is less than the {most} devices of this run; give those of a whole node")
    latency_text, bandwidth = config.getoption("node_latency"), _bytes_per_second(config, "--node-bandwidth")
    project_to = sizes(config, "--project-to")
    if (latency_text is None) != (bandwidth is None):
        raise pytest.UsageError("--node-latency and --node-bandwidth go together, got one of them; give both")
    if 1 in project_to:
        raise pytest.UsageError("--project-to 1 is one device, beside which others are laid; name 2 or more")
    if project_to and max(project_to) > MAX_WORLD_SIZE:
        raise pytest.UsageError(f"--project-to goes up to {MAX_WORLD_SIZE}, got {max(project_to)}; name fewer devices")
    beyond = [N for N in project_to if node < N]
    if beyond and bandwidth is None:
        raise pytest.UsageError(
            f"--project-to {beyond[0]} is beyond one node of {node} devices; give --node-latency and --node-bandwidth"
        )
    if parts := [N for N in beyond if N % node]:
        raise pytest.UsageError(f"--project-to {parts[0]} is no whole number of nodes of {node} devices; name a multiple")
    network = None
    if latency_text is not None and bandwidth is not None:
        network = Network(latency=seconds("--node-latency", latency_text, 1.0), bandwidth=bandwidth)
    return Links(
        bytes_per_second=_bytes_per_second(config, "--link-bandwidth"), node=node, network=network, project_to=project_to
    )


def _bytes_per_second(config: pytest.Config, option: str) -> float | None:
    """An option that is in GB/s of 1e9 bytes as everywhere; None if it is not given."""
    text = config.getoption(option)
    if text is None:
        return None
    return positive(option, text, "GB/s", most=MOST_GIGABYTES_PER_SECOND, example=450) * 1e9
