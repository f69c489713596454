"""The properties of a measurement spec by name, such as ranks, batch and strategy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ddpperf.results import units
from ddpperf.specs import (
    AllReduceSpec,
    CopySpec,
    CustomCollectiveSpec,
    CustomStepSpec,
    EpochSpec,
    RunSpec,
    SamplerSpec,
    Spec,
    TrainingSpec,
    format_bytes,
)
from ddpperf.specs.collective import Call
from ddpperf.specs.training import strategy_words


def properties_of(spec: Spec, *, device: str, global_batch: bool = False) -> dict[str, str]:
    """Return the properties of a spec that its id names, by name.

    The properties are in the order of the columns of a table. A property that does not apply, such
    as the strategy of a single device, is "". global_batch: name the images of a step on all ranks
    together instead of those on one rank.
    """
    found = {"GPUs" if device == "cuda" else "ranks": str(spec.world_size)}
    if isinstance(spec, TrainingSpec):
        batch = spec.global_batch_size if global_batch else spec.per_rank_batch_size
        found["global batch" if global_batch else "batch"] = f"{batch:,}"
        found["model"] = spec.model
        found["precision"] = spec.precision
        found["execution"] = "+".join(filter(None, (spec.execution, spec.inductor)))
        found["strategy"] = _strategy(spec)
        found["memory format"] = spec.memory_format
        workers = units.counted(spec.loader_workers, "worker")
        found["input"] = f"{spec.input}, {workers}" if spec.input == "dataloader" else spec.input
        if isinstance(spec, RunSpec):
            found |= _recipe(spec)
    elif isinstance(spec, SamplerSpec):
        found["uneven end"] = "dropped" if spec.drop_last else "padded"
        found["set_epoch"] = "yes" if spec.set_epoch else "no"
    elif isinstance(spec, CustomStepSpec):
        found["batch"] = f"{spec.per_rank_batch_size:,}"
        found["function"] = spec.function
        found["execution"] = spec.execution
    elif isinstance(spec, Call | CopySpec):
        found["buffer"] = size(spec.nbytes)
        found["collective"] = getattr(spec, "kind", spec.measurement)
        if isinstance(spec, CustomCollectiveSpec):
            found["algorithm"] = spec.function
        elif isinstance(spec, AllReduceSpec):
            found["algorithm"] = spec.algorithm
            found["result"] = "in place" if spec.in_place else "out of place"
        found["execution"] = spec.execution
    return found


def _strategy(spec: TrainingSpec) -> str:
    """Return the strategy with its options; the name of a communication hook is marked as such."""
    words = strategy_words(spec).removeprefix("single")
    hook = spec.comm_hook
    return words if hook == "none" else words.replace(f"+{hook}", f"+{hook}_hook", 1)


def _recipe(spec: RunSpec) -> dict[str, str]:
    words = [f"{spec.optimizer} {spec.rate:g}", spec.schedule, *spec.words]
    return {"epochs": str(spec.epochs), "recipe": " ".join(words), "seed": str(spec.seed)}


def usual_properties(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties that the options of a run give its measurements, by name."""
    options = header["options"]
    usual = {"input": "fixed", "result": "in place", "set_epoch": "yes", "collective": "all_reduce"}
    usual["algorithm"] = header["environment"].get("backend") or "backend"
    usual |= {name: options[name] for name in ("model", "precision", "input") if name in options}
    if executions := options.get("executions"):
        usual["execution"] = executions[0]
    return usual


def in_words(name: str, value: str) -> str:
    """Return a property as text for a heading, such as "2 ranks" or "batch 32 per rank"."""
    if name == "input":
        return {"fixed": "one fixed batch", "device": "images on the device"}.get(value, value)
    if name in ("ranks", "GPUs", "epochs", "seeds"):
        return f"{value} {name if value != '1' else name.removesuffix('s')}"
    if name == "batch":
        return f"batch {value} per rank"
    if name == "recipe":
        return f'recipe "{value}"'  # the names of recipes contain commas
    return f"{name} {value}" if name in ("global batch", "seed", "set_epoch", "uneven end") else value


def size(nbytes: int) -> str:
    """Return a buffer's size with a space before its unit, such as "64 MiB"."""
    return re.sub(r"(?<=\d)(?=[KMG]?i?B)", " ", format_bytes(nbytes))


def timed_work(spec: Spec) -> str:
    """Return the name of the work that a spec times, such as "step" or "call"."""
    if isinstance(spec, RunSpec):
        return "training"
    if isinstance(spec, EpochSpec):
        return "epoch"
    if isinstance(spec, TrainingSpec | CustomStepSpec):
        return "step"
    return "listing" if isinstance(spec, SamplerSpec) else "call"
