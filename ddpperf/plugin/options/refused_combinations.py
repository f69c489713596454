"""Options that cannot be used together, or not on this machine, such as world sizes above its GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import product
from typing import Any

from ddpperf.data.cache import Data
from ddpperf.errors import Refused
from ddpperf.plugin.options.ab_sides import changed
from ddpperf.plugin.options.option_table import Value
from ddpperf.plugin.options.options import Options
from ddpperf.results.units import counted
from ddpperf.specs import is_custom_model
from ddpperf.specs.training_step import gpu_reason

GPU_PRECISIONS = ("tf32", "fp16")  # number formats that the CPU does not have


def check_combinations(options: Options, gpu_count: int, *, compares: bool) -> None:
    """Raise Refused for options that cannot be used together, or not on a machine with `gpu_count` GPUs.

    compares: whether --benchmark-compare is given.
    """
    if options.precision in GPU_PRECISIONS and options.device != "cuda":
        raise Refused(f"--precision {options.precision} needs a GPU, this runs on the CPU; pass fp32 or bf16")
    if is_custom_model(options.model) and options.data_source != "synthetic":
        raise Refused(f"--model {options.model} makes its own batches, got --data, too; leave one out")
    if options.replicates == 1 and options.sides is not None and not compares:
        raise Refused("--replicates 1 cannot tell a difference from chance in an A/B run; pass 2 or more")
    _check_devices(options, gpu_count)
    _check_trainings(options)


def _check_devices(options: Options, gpu_count: int) -> None:
    """Check that nodes and GPUs suffice for the world sizes, and that nodes suit --project-to."""
    most, node, nodes = max(options.world_sizes), options.links.node, options.nodes
    here = node if nodes > 1 else most
    if options.device == "cuda" and here > gpu_count:
        what = f"--node-size {here}" if nodes > 1 else f"world_size={here}"
        instead = f"at most {gpu_count}, or --device cpu" if gpu_count else "--device cpu"
        raise Refused(f"{what} needs {counted(here, 'GPU')}, found {gpu_count}; pass {instead}")
    for N in options.world_sizes:
        if nodes > 1 and node < N and (N % node or node * nodes < N):
            what = f"--world-sizes {N} does not fit {nodes} nodes of {node} ranks"
            instead = f"at most {node}, or a multiple of {node} up to {node * nodes}"
            raise Refused(f"{what}; pass {instead}, or change --nodes or --node-size")
    if node < most and nodes == 1:
        raise Refused(f"--node-size {node} is less than the {most} devices of this run; pass {most} or more")
    for N in options.links.project_to:
        if node < N and most <= node and options.links.network is None:
            raise Refused(f"--project-to {N} is more than one node of {node} devices; pass --node-link")
        if node < N and N % node:
            whole = f"whole nodes of {node} devices; pass a multiple of {node}"
            raise Refused(f"--project-to {N} does not fill {whole}")


def _check_trainings(options: Options) -> None:
    """Check that the given training fields are possible on this machine, and that each has an effect."""
    known = dataclasses.replace(options, data=Data(), requested_epoch_images=None)
    sizes = {"world_size": max(options.world_sizes)}
    try:
        steps = [
            known.step(**sizes, per_rank_batch_size=batch_size, execution=execution)
            for execution, batch_size in product(options.executions, options.batch_sizes)
        ]
        dataclasses.replace(steps[0], delay_seconds=options.delay_seconds)
        _require_change("--spec", options.spec_fields, steps, options.device)
        if options.sides is not None:
            fields = options.sides.spec_fields
            _require_change("--candidate", fields, [changed(step, fields) for step in steps], options.device)
    except ValueError as error:
        raise Refused(f"{error}{'' if ';' in str(error) else '; pass another value'}") from error


def _require_change(option: str, given: Mapping[str, Value], steps: list[Any], device: str) -> None:
    """Check that the device can run the steps, and that each given field has its value in some step."""
    for step in steps:
        if reason := gpu_reason(step, device):
            raise Refused(f"{reason}; pass other --executions or another {option}")
    for name, value in given.items():
        if all(getattr(step, name) != value for step in steps):
            raise Refused(f"{option} {name}={value} changes no training of this run; leave it out")
