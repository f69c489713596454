"""Options that cannot be used together, or on this machine, or with these images, models and sides.

`check_combinations` takes no time. `prepare` and `check_sides` may decode images and start processes.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, get_args

from ddpperf.data import cache
from ddpperf.data.cache import Data
from ddpperf.errors import Refused
from ddpperf.io.command import print_lines
from ddpperf.machine.child_process import package_path, run_child
from ddpperf.plugin.options.ab_sides import changed, options_of_side
from ddpperf.plugin.options.option_table import Value
from ddpperf.plugin.options.options import CIFAR_CLASSES, Options
from ddpperf.results.units import counted
from ddpperf.specs import FUNCTIONS_VARIABLE, Model, is_custom_model
from ddpperf.specs.custom import TRAINED
from ddpperf.specs.training_step import DATA_VARIABLE, gpu_reason
from ddpperf.workers.interpreter import Side, check_side

GPU_PRECISIONS = ("tf32", "fp16")  # number formats that the CPU does not have
MODEL_SECONDS = 120


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


def prepare(options: Options, root: Path) -> Options:
    """Check the images and the model, and return the options with the decoded data set."""
    if (folder := options.worker_logs) is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = f"--worker-logs {folder} cannot be made"
            raise Refused(f"{where} ({error.strerror}); name another folder") from error
    cached = root / ".ddpperf" / "data"
    data = cache.prepare(options.data_source, cached, lambda line: print_lines([f"ddpperf: {line}"]))
    ranks, count = max(options.world_sizes), options.requested_epoch_images
    if options.model.endswith("_cifar") and data.classes > CIFAR_CLASSES:
        found = f"{CIFAR_CLASSES} outputs, {data.name} has {data.classes} classes"
        raise Refused(f"--model {options.model} has {found}; pass --model resnet18")
    if count is not None and not ranks <= count <= data.train_images:
        limits = (
            f"{ranks} to {data.train_images} images: at least one per rank, and at most those of {data.name}"
        )
        raise Refused(f"--epoch-images takes {limits}, got {count}; pass another number")
    options = dataclasses.replace(options, data=data)
    check_model(options)
    return options


def check_sides(options: Options, functions: Iterable[str]) -> Options:
    """Check that the interpreters of base and candidate can run ranks.

    torch, a custom model and the functions that the collected tests measure are imported in each
    interpreter, which takes seconds. Returns the options with the functions and the found versions.
    """
    known = sorted({function for function in functions if not lacking_side(options, function)})
    options = dataclasses.replace(options, functions=tuple(known))
    if (sides := options.sides) is None:
        return options
    imported = [options.model, *known]
    found = {
        side.name: check_side(side, options_of_side(side), options.device, imported)
        for side in (sides.base, sides.candidate)
        if side != Side(name=side.name)  # this process has shown that its own interpreter works
    }
    return dataclasses.replace(options, sides=dataclasses.replace(sides, found=found))


def lacking_side(options: Options, function: str) -> str:
    """Return "base" or "candidate" if only its source tree lacks a function's module or a script, or "".

    Such a function is new, and its tests have nothing to be compared with.
    """
    file, sides = function.partition(":")[0].replace(".", "/"), options.sides

    def holds(root: Path) -> bool:
        if function.startswith((".", "/")):  # a script
            return (root / function).is_file()
        places = (root / folder / f"{file}{end}" for folder in ("", "src") for end in (".py", "/__init__.py"))
        return any(place.exists() for place in places)

    roots = {"base": sides.base.root, "candidate": sides.candidate.root} if sides is not None else {}
    lacking = [name for name, root in roots.items() if root is not None and not holds(root)]
    return lacking[0] if lacking and holds(Path.cwd()) else ""


def check_model(options: Options) -> None:
    """Train one step of a custom model in a child process, on the run's device and in its precision.

    Raises Refused if that fails.
    """
    model, data = options.model, options.data
    if model in get_args(Model):
        return
    batch_size = min(2, min(options.batch_sizes) // int(options.spec_fields.get("accumulation_steps", 1)))
    command = [sys.executable, "-m", "ddpperf.training.check_model", model, str(batch_size)]
    command += [options.device, options.precision, data.name, data.digest, str(data.train_images)]
    variables = {FUNCTIONS_VARIABLE: model, "PYTHONPATH": package_path()}
    variables |= {DATA_VARIABLE: str(data.path)} if data.path is not None else {}
    advice = "train it without ddpperf"
    try:
        ended = run_child(command, variables, MODEL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Refused(f"--model {model} trained no step in {MODEL_SECONDS} s; {advice}") from error
    lines = ended.stderr.strip().splitlines()
    if ended.returncode == 1 and lines:  # the check exits with a sentence
        raise Refused(f"--model: {lines[-1]}")
    if ended.returncode or TRAINED not in ended.stdout:
        raise Refused(f"--model {model} ended its process with status {ended.returncode}; {advice}")
