"""Frozen dataclasses that describe what to measure, and that are sent to the ranks as JSON.

This package imports the standard library only. Two samples are comparable if their specs are equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ddpperf.errors import first_line, quoted, short
from ddpperf.specs.collective import AllReduceSpec, CallExecution, CollectiveSpec, CopySpec, format_bytes
from ddpperf.specs.common_fields import Fault, Spec
from ddpperf.specs.custom import FUNCTIONS_VARIABLE, CustomCollectiveSpec, CustomStepSpec
from ddpperf.specs.instruments import (
    DATA_PARALLEL_PARTS,
    PARTS,
    BucketReplaySpec,
    EpochPartsSpec,
    MessagesSpec,
    PartsSpec,
    TraceSpec,
    measured_as,
)
from ddpperf.specs.recipe import RunSpec
from ddpperf.specs.shard import SamplerSpec
from ddpperf.specs.training import (
    EpochSpec,
    Execution,
    Input,
    Model,
    Precision,
    TrainingSpec,
    is_custom_model,
)

# Fields of stored specs that this version no longer has. They are ignored when a spec is read.
RETIRED_FIELDS = ("cutout",)


def to_json(spec: Spec) -> dict[str, Any]:
    """Return a measurement spec as a JSON object, with its kind of measurement as "measurement".

    A field with its default value is omitted, so that the older code of an A/B run's base can read
    the object although it does not know the field.
    """
    changed = spec.changed_fields
    if spec.fault is not None:
        changed["fault"] = dataclasses.asdict(spec.fault)
    return {"measurement": spec.measurement, **changed}


def from_json(fields: dict[str, Any]) -> Spec:
    """Return the measurement spec for a JSON object that `to_json` made, without retired fields.

    Raises ValueError for any other JSON object.
    """
    values = {name: value for name, value in fields.items() if name not in RETIRED_FIELDS}
    name = values.pop("measurement", None)
    if name not in tuple(Spec.kinds):
        raise ValueError(f"measurement is {quoted(name)}; it must be one of {', '.join(Spec.kinds)}")
    try:
        if values.get("fault") is not None:
            values["fault"] = Fault(**values["fault"])
        return Spec.kinds[name](**values)
    except TypeError as error:
        found = f"{short(', '.join(values))} ({first_line(error)})"
        raise ValueError(f"{name} has other fields than these: {found}") from error
