"""What can be measured: frozen specs that travel as plain JSON. Standard library only.

Equal specs are equal work: a stored time is comparable with a new one when their specs are equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from ddpperf.specs.base import Fault, FaultCommand, FaultKind, require_one_of
from ddpperf.specs.collective import FLOAT32_BYTES, Algorithm, AllReduceSpec, format_bytes
from ddpperf.specs.copying import CopySpec
from ddpperf.specs.sampling import SamplerSpec
from ddpperf.specs.strategy import CommHook, Form, Strategy, gpu_reason
from ddpperf.specs.training import (
    DATA_VARIABLE,
    MODEL_VARIABLE,
    EpochSpec,
    Input,
    MemoryFormat,
    Model,
    Precision,
    TrainingSpec,
    is_own_model,
    require_model,
)

__all__ = [
    "DATA_VARIABLE",
    "FLOAT32_BYTES",
    "MODEL_VARIABLE",
    "Algorithm",
    "AllReduceSpec",
    "CommHook",
    "CopySpec",
    "EpochSpec",
    "Fault",
    "FaultCommand",
    "FaultKind",
    "Form",
    "Input",
    "MemoryFormat",
    "Model",
    "Precision",
    "SamplerSpec",
    "Spec",
    "Strategy",
    "TrainingSpec",
    "format_bytes",
    "from_json",
    "gpu_reason",
    "is_own_model",
    "require_model",
    "to_json",
]

Spec = TrainingSpec | EpochSpec | AllReduceSpec | SamplerSpec | CopySpec

_SPECS: dict[str, type[Spec]] = {spec.measurement: spec for spec in get_args(Spec)}


def to_json(spec: Spec) -> dict[str, Any]:
    """The spec as JSON values, with the name of its measurement under "measurement"."""
    return {"measurement": spec.measurement, **dataclasses.asdict(spec)}


def from_json(fields: dict[str, Any]) -> Spec:
    """The spec that `to_json` wrote; raises ValueError for anything else."""
    values = dict(fields)
    name = values.pop("measurement", None)
    require_one_of("measurement", name, tuple(_SPECS))
    try:
        if values.get("fault") is not None:
            values["fault"] = Fault(**values["fault"])
        return _SPECS[name](**values)
    except TypeError as error:
        raise ValueError(f"{name} has other fields than these: {', '.join(values)} ({error})") from error
