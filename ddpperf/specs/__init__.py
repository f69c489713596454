"""Frozen dataclasses that describe what to measure, and that are sent to the ranks as JSON.

This package imports the standard library only. Two samples are comparable if their specs are equal.
"""

from __future__ import annotations

from ddpperf.specs.collective import (
    AllReduceSpec,
    CallExecution,
    CollectiveSpec,
    CopySpec,
    SingleCallsSpec,
    format_bytes,
)
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
from ddpperf.specs.script import ScriptSpec
from ddpperf.specs.spec import RETIRED_FIELDS, Spec, from_json, to_json
from ddpperf.specs.training_step import (
    EpochSpec,
    Execution,
    Input,
    Model,
    Precision,
    SamplerSpec,
    TrainingSpec,
    is_custom_model,
)
from ddpperf.specs.whole_training import RunSpec
