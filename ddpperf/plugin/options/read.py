"""Reading of the command line into one `Options` object.

Reading changes nothing. For runs on several nodes it reads the hostfile, and may look up the name in
MASTER_ADDR by DNS.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpperf.analysis.projection import Network
from ddpperf.data.cache import prepare as prepare_data
from ddpperf.errors import Refused
from ddpperf.machine.hardware import Links
from ddpperf.machine.network import Interface, find_interface, interfaces
from ddpperf.node.defaults import PORT
from ddpperf.node.hostfile import read_hostfile
from ddpperf.plugin.options.checks import check_benchmark_options, check_options, check_root, slower_ratio
from ddpperf.plugin.options.declared import AB_OPTIONS, GROUPS, OPTIONS, WrongValue
from ddpperf.plugin.options.options import NodeOptions, Options, default_world_sizes
from ddpperf.plugin.options.sides import PYTHON_AND_ROOT, Sides
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.secret_values import shown_value
from ddpperf.workers.interpreter import Side

ROUNDS, AB_ROUNDS = 10, 7
CPU_NODE_SIZE = 2  # ranks
NODE_OPTIONS = {option.name for option in GROUPS["Several nodes"]} - {"--nodes", "--launcher"}


def read_options(config: pytest.Config, gpu_count: int) -> Options:
    """Return the options of the command line, with the defaults of this machine.

    Raises Refused for options that cannot be used together. `prepare` makes the slow checks later.
    """
    given = {name: value for name in OPTIONS if (value := config.getoption(name)) not in (None, [])}
    for value in given.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, WrongValue):
                raise Refused(part)
    check_benchmark_options(config, given.keys())
    device = given.get("--device", "auto")
    if device == "auto":
        device = "cuda" if gpu_count else "cpu"

    values = {name: option.default_on(device) for name, option in OPTIONS.items()} | given
    nodes = _nodes(given, values, device, gpu_count)
    world_sizes = given.get("--world-sizes") or default_world_sizes(
        device, gpu_count, nodes.count, nodes.size if nodes.count > 1 else 0
    )
    delay_seconds = given.get("--slow-down", 0.0)
    sides = _sides(given, delay_seconds)
    if sides is not None:
        check_root(config)
    options = Options(
        given=frozenset(given),
        device=device,
        world_sizes=world_sizes,
        batch_sizes=values["--batch-sizes"],
        global_batch_sizes=values["--global-batch-sizes"],
        model=values["--model"],
        precision=values["--precision"],
        executions=values["--executions"],
        spec_fields=_pairs(given, "--spec"),
        data_source=values["--data"],
        images=prepare_data("synthetic", Path(), print) if values["--data"] == "synthetic" else None,
        requested_epoch_images=given.get("--epoch-images"),
        delay_seconds=delay_seconds,
        rounds=given.get("--rounds", ROUNDS if sides is None else AB_ROUNDS),
        replicates=given.get("--replicates"),
        sides=sides,
        confirm_seconds=values["--confirm-seconds"],
        max_seconds=values["--max-seconds"],
        deadline_seconds=values["--deadline"],
        worker_logs=_path(given, "--worker-logs"),
        traces=_path(given, "--traces"),
        checkpoints=_path(given, "--checkpoints"),
        slower_ratio=slower_ratio(config),
        links=_links(given, nodes.size if nodes.count > 1 else max(world_sizes)),
        gpu_hour_price=given.get("--gpu-hour-price"),
        nodes=nodes,
    )
    check_options(options, gpu_count, compares=bool(config.getoption("benchmark_compare")))
    return options


def _nodes(given: dict[str, Any], values: Mapping[str, Any], device: str, gpu_count: int) -> NodeOptions:
    """Return the options of a run on several nodes, with torch's variables for what is not given."""
    count, hostfile = values["--nodes"], _path(given, "--hostfile")
    if count == 1:
        if extra := sorted(given.keys() & NODE_OPTIONS):
            what = f"{extra[0]} is only for runs on several nodes"
            raise Refused(f"{what}; pass --nodes 2, or remove {extra[0]}")
        return NodeOptions(launcher=given.get("--launcher"))
    usual = CPU_NODE_SIZE if device == "cpu" else gpu_count
    if device == "cpu" and (requested := given.get("--world-sizes")):
        usual = -(-max(requested) // count)
    return NodeOptions(
        count=count,
        size=given.get("--node-size", max(1, usual)),
        interface=_interface(given.get("--interface")),
        port=given.get("--node-port") or _master_port(),
        key=Path(values["--node-key"]),
        seconds=values["--node-seconds"],
        hostfile=None if hostfile is None else read_hostfile(hostfile, count),
        launcher=given.get("--launcher"),
    )


def _interface(requested: str | None) -> Interface:
    """Return the requested network interface, or that of MASTER_ADDR or of the default route."""
    name = os.environ.get("MASTER_ADDR")
    if requested is None and name is not None:
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(name)
            for one in interfaces():
                if one.address == address and not one.is_loopback:
                    return one
    return find_interface(requested)


def _master_port() -> int:
    text = os.environ.get("MASTER_PORT", str(PORT))
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise Refused(f"MASTER_PORT must be a port number, got {text!r}; pass --node-port")
    return int(text)


def _sides(given: dict[str, Any], delay_seconds: float) -> Sides | None:
    if not any(option.name in given for option in AB_OPTIONS):
        return None
    return Sides(
        base=_side(given, BASE, {}),
        candidate=_side(given, CANDIDATE, _pairs(given, "--against-env")),
        spec_fields=_pairs(given, "--against-spec"),
        delay_seconds=delay_seconds,
    )


def _side(given: dict[str, Any], name: str, environment: Mapping[str, str]) -> Side:
    python, root = PYTHON_AND_ROOT[name]
    interpreter = given.get(python, sys.executable)
    return Side(name=name, python=interpreter, root=_path(given, root), environment=environment)


def _path(given: dict[str, Any], option: str) -> Path | None:
    return Path(given[option]) if option in given else None


def _pairs(given: dict[str, Any], option: str) -> dict[str, Any]:
    """Convert the NAME=VALUE pairs of a repeated option to a dict; no name may be set twice."""
    found: dict[str, Any] = {}
    for name, value in given.get(option, ()):
        if name in found:
            values = " and ".join(shown_value(name, str(text)) for text in (found[name], value))
            raise Refused(f"{option} sets {name} twice, got {values}; set it once")
        found[name] = value
    return found


def _links(given: dict[str, Any], most_devices: int) -> Links:
    latency, bandwidth = given.get("--node-latency", 0.0), given.get("--node-bandwidth", 0.0)
    if bool(latency) != bool(bandwidth):
        raise Refused("--node-latency and --node-bandwidth go together, got one of them; give both")
    return Links(
        bytes_per_second=given.get("--link-bandwidth"),
        node=given.get("--node-size", most_devices),
        network=Network(latency=latency, bandwidth=bandwidth) if bandwidth else None,
        project_to=given.get("--project-to", ()),
        buffer_sizes=given.get("--buffer-sizes", ()),
    )
