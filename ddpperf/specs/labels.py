"""The labels of a spec: its properties as words, for test ids, tables and headings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpperf.specs.collective import AllReduceSpec, Call, CopySpec, format_bytes
from ddpperf.specs.custom import CustomStepSpec
from ddpperf.specs.script import ScriptSpec
from ddpperf.specs.spec import Spec
from ddpperf.specs.training_step import SamplerSpec, TrainingSpec
from ddpperf.specs.whole_training import RunSpec

# The words of fields that differ from their defaults. The value of the field is argument 0.
STRATEGY_WORDS = {
    "comm_hook": "{}",
    "bucket_cap_mb": "bucket{}",
    "gradient_as_bucket_view": "view",
    "static_graph": "static",
    "buffer_sync": "no_buffer_sync",
    "sync_batch_norm": "sync_batch_norm",
    "communication": "{}",
    "comm_delay_seconds": "comm_delay{:g}s@{spec.comm_delay_rank}",
    "accumulation_steps": "accumulate{}",
}
RECIPE_WORDS = {
    "optimizer": "{}",
    "schedule": "{}",
    "grow_from": "grow{}",
    "momentum": "mom{:g}",
    "weight_decay": "decay{:g}",
    "label_smoothing": "smooth{:g}",
    "cutmix": "cutmix{:g}",
    "crop_padding": "pad{}",
    "uncropped_epochs": "uncropped{}",
    "average_weights": "averaged",
    "clip_norm": "clip{:g}",
    "nesterov": "no_nesterov",
    "decay_vectors": "decay_all",
    "set_epoch": "no_set_epoch",
}


UNNAMED = ("memory format", "warm-up")  # labels that no test id has


def labels(spec: Spec) -> dict[str, str]:
    """Return the labels of a spec by property, in the order of the words of a test id."""
    if isinstance(spec, TrainingSpec):
        found = {"batch": f"b{spec.per_rank_batch_size}", **training_labels(spec)}
        if isinstance(spec, RunSpec):
            found["recipe"] = "-".join([f"lr{spec.rate:g}", *_changed(spec, RunSpec, RECIPE_WORDS)])
            found["seed"] = f"seed{spec.seed}"
            found["warm-up"] = f"warm-up {spec.warmup_epochs}" * bool(spec.warmup_epochs)
        return found
    if isinstance(spec, SamplerSpec):
        order = "set_epoch" if spec.set_epoch else "no_set_epoch"
        return {"uneven end": "drop_last" if spec.drop_last else "padded", "order": order}
    found = {}
    if isinstance(spec, ScriptSpec):
        found["script"] = spec.script
    if isinstance(spec, CustomStepSpec):
        found["batch"] = f"b{spec.per_rank_batch_size}"
    if isinstance(spec, Call | CopySpec):
        found["buffer"] = format_bytes(spec.nbytes)
    if isinstance(spec, Call):
        found["type"] = spec.dtype if spec.dtype != Call.dtype else ""
    if spec.on_cpu:
        found["memory"] = "host"
    for function in () if isinstance(spec, ScriptSpec) else spec.functions:
        found["function"] = function.rpartition(":")[2]
    if isinstance(spec, Call):
        found["collective"] = getattr(spec, "kind", spec.measurement)
    if isinstance(spec, AllReduceSpec):
        found["algorithm"] = spec.algorithm
    found["execution"] = spec.execution
    if isinstance(spec, AllReduceSpec):
        found["result"] = "in place" if spec.in_place else "out_of_place"
    return found


def training_labels(spec: Any) -> dict[str, str]:
    """Return the labels of a training spec, or of an object with the same fields."""
    strategy = "+".join([spec.strategy, *_changed(spec, TrainingSpec, STRATEGY_WORDS)])
    return {
        "model": spec.model,
        "precision": spec.precision,
        "execution": spec.execution,
        "inductor": spec.inductor,
        "strategy": strategy.replace("symmetric_memory", "symm"),
        "memory format": spec.memory_format,
        "input": f"{spec.input}{spec.loader_workers if spec.input == 'dataloader' else ''}",
    }


def _changed(spec: Any, usual: type, words: Mapping[str, str]) -> list[str]:
    """Return the words for the fields of a spec that differ from their defaults in the class `usual`."""
    changed = {name: getattr(spec, name) for name in words if getattr(spec, name) != getattr(usual, name)}
    return [words[name].format(value, spec=spec) for name, value in changed.items()]
