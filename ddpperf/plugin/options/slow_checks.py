"""Slow checks before a test run, of the images, the model and the interpreters."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from ddpperf.data import cache
from ddpperf.errors import Refused
from ddpperf.io.command import print_lines
from ddpperf.machine.child_process import package_path, run_child
from ddpperf.plugin.options.ab_sides import options_of_side
from ddpperf.plugin.options.options import CIFAR_CLASSES, Options
from ddpperf.specs import FUNCTIONS_VARIABLE, Model
from ddpperf.specs.custom import TRAINED
from ddpperf.specs.training_step import DATA_VARIABLE
from ddpperf.workers.interpreter import Side, check_side

MODEL_SECONDS = 120


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
    """Return "base" or "candidate" if only its source tree lacks a function's module, or "".

    Such a function is new, and its tests have nothing to be compared with.
    """
    file, sides = function.partition(":")[0].replace(".", "/"), options.sides

    def holds(root: Path) -> bool:
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
    try:
        ended = run_child(command, variables, MODEL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Refused(
            f"--model {model} trained no step in {MODEL_SECONDS} s; train it without ddpperf"
        ) from error
    lines = ended.stderr.strip().splitlines()
    if ended.returncode == 1 and lines:  # the check exits with a sentence
        raise Refused(f"--model: {lines[-1]}")
    if ended.returncode or TRAINED not in ended.stdout:
        raise Refused(
            f"--model {model} ended its process with status {ended.returncode}; train it without ddpperf"
        )
