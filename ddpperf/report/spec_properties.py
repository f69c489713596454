"""The properties of a measurement spec by name, such as ranks, batch and strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpperf.specs import (
    CustomStepSpec,
    EpochSpec,
    RunSpec,
    SamplerSpec,
    Spec,
    TrainingSpec,
)
from ddpperf.specs.labels import labels


def properties_of(spec: Spec, *, device: str, global_batch: bool = False) -> dict[str, str]:
    """Return the properties of a spec that its id names, by name.

    The properties are in the order of the columns of a table. A property that does not apply, such
    as the strategy of a single device, is "". global_batch: name the images of a step on all ranks
    together instead of those on one rank.
    """
    found = {"GPUs" if device == "cuda" else "ranks": str(spec.world_size), **labels(spec)}
    if isinstance(spec, TrainingSpec | CustomStepSpec):
        found["batch"] = f"{spec.per_rank_batch_size:,}"
    if isinstance(spec, TrainingSpec):
        found["strategy"] = found["strategy"].removeprefix("single")
        found["execution"] = "+".join(filter(None, (spec.execution, found.pop("inductor"))))
        if global_batch:
            found = {"global batch" if name == "batch" else name: value for name, value in found.items()}
            found["global batch"] = f"{spec.global_batch_size:,}"
    if isinstance(spec, RunSpec):
        found["epochs"] = str(spec.epochs)
    return found


def usual_properties(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties that the options of a run give its measurements, by name."""
    options = header["options"]
    usual = {"input": "fixed", "result": "in place", "order": "set_epoch", "collective": "all_reduce"}
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
    return f"{name} {value}" if name in ("global batch", "uneven end") else value


def timed_work(spec: Spec) -> str:
    """Return the name of the work that a spec times, such as "step" or "call"."""
    if isinstance(spec, RunSpec):
        return "training"
    if isinstance(spec, EpochSpec):
        return "epoch"
    if isinstance(spec, TrainingSpec | CustomStepSpec):
        return "step"
    return "listing" if isinstance(spec, SamplerSpec) else "call"
