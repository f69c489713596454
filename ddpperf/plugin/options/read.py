"""Reading of the command line into one `Options` object.

Reading is fast and has no side effects.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpperf.analysis.projection import Network
from ddpperf.data.cache import prepare as prepare_data
from ddpperf.errors import Refused
from ddpperf.machine.hardware import Links
from ddpperf.plugin.options.checks import check_benchmark_options, check_options, check_root, slower_ratio
from ddpperf.plugin.options.declared import AB_OPTIONS, OPTIONS, WrongValue
from ddpperf.plugin.options.options import Options, default_world_sizes
from ddpperf.plugin.options.sides import PYTHON_AND_ROOT, Sides
from ddpperf.results.samples import BASE, CANDIDATE
from ddpperf.workers.interpreter import Side

ROUNDS, AB_ROUNDS = 10, 7


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
    world_sizes = given.get("--world-sizes") or default_world_sizes(device, gpu_count)
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
        links=_links(given, max(world_sizes)),
        gpu_hour_price=given.get("--gpu-hour-price"),
    )
    check_options(options, gpu_count, compares=bool(config.getoption("benchmark_compare")))
    return options


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
            raise Refused(f"{option} sets {name} twice, got {found[name]} and {value}; set it once")
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
