"""What the user says of links between devices and nodes, what to send over them, and to how many devices to project a step."""

from __future__ import annotations

import re

import pytest

from ddpperf.analysis.projection import Network
from ddpperf.machine.links import Links
from ddpperf.plugin.options.values import MAX_WORLD_SIZE, positive, seconds, sizes, whole_number
from ddpperf.specs.collective import FLOAT32_BYTES

MOST_GIGABYTES_PER_SECOND = 10**5
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MOST_BYTES = 2**33


def add_link_options(group: pytest.OptionGroup) -> None:
    for name, metavar, text in (
        (
            "--buffer-sizes",
            "SIZE,SIZE",
            "of all_reduces and other collectives, a rank, as 64KiB (default: of the backend's all_reduce from 1KiB to 64MiB, "
            "to 1GiB on GPUs; fewer of others)",
        ),
        (
            "--link-bandwidth",
            "GB/S",
            "between a device and the others, in one direction (default: what the driver says)",
        ),
        (
            "--project-to",
            "N,N",
            "numbers of devices for which test_projection says what a step's excess would be",
        ),
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
        raise pytest.UsageError(
            f"--node-size {node} is less than the {most} devices of this run; give those of a whole node"
        )
    latency_text, bandwidth = config.getoption("node_latency"), _bytes_per_second(config, "--node-bandwidth")
    project_to = sizes(config, "--project-to")
    if (latency_text is None) != (bandwidth is None):
        raise pytest.UsageError("--node-latency and --node-bandwidth go together, got one of them; give both")
    if 1 in project_to:
        raise pytest.UsageError("--project-to 1 is one device, beside which others are laid; name 2 or more")
    if project_to and max(project_to) > MAX_WORLD_SIZE:
        raise pytest.UsageError(
            f"--project-to goes up to {MAX_WORLD_SIZE}, got {max(project_to)}; name fewer devices"
        )
    beyond = [N for N in project_to if node < N]
    if beyond and bandwidth is None:
        raise pytest.UsageError(
            f"--project-to {beyond[0]} is beyond one node of {node} devices; give --node-latency and --node-bandwidth"
        )
    if parts := [N for N in beyond if N % node]:
        raise pytest.UsageError(
            f"--project-to {parts[0]} is no whole number of nodes of {node} devices; name a multiple"
        )
    network = None
    if latency_text is not None and bandwidth is not None:
        network = Network(latency=seconds("--node-latency", latency_text, 1.0), bandwidth=bandwidth)
    return Links(
        bytes_per_second=_bytes_per_second(config, "--link-bandwidth"),
        node=node,
        network=network,
        project_to=project_to,
        buffer_sizes=_buffer_sizes(config, "--buffer-sizes"),
    )


def _buffer_sizes(config: pytest.Config, option: str) -> tuple[int, ...]:
    text = config.getoption(option)
    if text is None:
        return ()
    found = sorted(_bytes(option, word.strip()) for word in text.split(","))
    if len(set(found)) != len(found):
        raise pytest.UsageError(f"{option} names a size twice, got {text!r}; name each once")
    return tuple(found)


def _bytes(option: str, word: str) -> int:
    """A size as test ids have it."""
    match = re.fullmatch(r"([0-9]{1,10})(B|KiB|MiB|GiB)?", word)
    nbytes = int(match[1]) * UNITS[match[2] or "B"] if match else 0
    if not 0 < nbytes <= MOST_BYTES:
        raise pytest.UsageError(
            f"{option} takes sizes from 4B to 8GiB, got {word[:40]!r}; pass for example {option} 1KiB,64MiB"
        )
    if nbytes % FLOAT32_BYTES:
        raise pytest.UsageError(
            f"{option} {word} is no whole number of float32, of {FLOAT32_BYTES} bytes each; name a multiple of {FLOAT32_BYTES}"
        )
    return nbytes


def _bytes_per_second(config: pytest.Config, option: str) -> float | None:
    """An option that is in GB/s of 1e9 bytes as everywhere; None if it is not given."""
    text = config.getoption(option)
    if text is None:
        return None
    return positive(option, text, "GB/s", most=MOST_GIGABYTES_PER_SECOND, example=450) * 1e9
