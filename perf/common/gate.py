"""Which cases run before every merge, with `-m gate`; docs/gate.md says why.

Each function belongs to one test and returns whether the gate runs this spec of it.
"""

from __future__ import annotations

from ddpperf.plugin.options.options import Options
from ddpperf.specs import AllReduceSpec, TrainingSpec

LEAST_BYTES = 2**24  # on GPUs, launches bind an all-reduce of fewer bytes


def scaling(options: Options, spec: TrainingSpec) -> bool:
    """Select one device and all devices, in the first execution."""
    return (
        spec.world_size in (1, max(options.world_sizes))
        and _first_execution(options, spec)
        and spec.model == options.model
    )


def strong_scaling(options: Options, spec: TrainingSpec) -> bool:
    """Select all GPUs, in the first execution. On a CPU weak scaling measures the same t(N)."""
    return (
        options.device == "cuda"
        and spec.world_size == max(options.world_sizes)
        and _first_execution(options, spec)
    )


def strategies(options: Options, spec: TrainingSpec) -> bool:
    """Select the first execution; on a CPU without FSDP, whose process sets differ too much."""
    return _first_execution(options, spec) and (options.device == "cuda" or spec.strategy != "fsdp")


def reduced_precision(options: Options, spec: TrainingSpec) -> bool:
    """Select reduced precision on a CPU, where all other cases are fp32."""
    return options.device == "cpu" and spec.precision != options.precision


def large_all_reduce(options: Options, spec: AllReduceSpec) -> bool:
    """Select large captured calls on all GPUs, by NCCL and in mapped memory.

    On a CPU gloo's calls differ by a fifth between process sets.
    """
    largest = spec.world_size == max(options.world_sizes) and spec.nbytes >= LEAST_BYTES
    chosen = spec.algorithm == "backend" or (spec.algorithm == "two_shot" and spec.in_place)
    return options.device == "cuda" and largest and spec.captured and chosen


def _first_execution(options: Options, spec: TrainingSpec) -> bool:
    left_out = {"data_parallel", "own_ddp"} - {options.spec_fields.get("strategy")}
    return spec.execution == options.executions[0] and spec.strategy not in left_out
