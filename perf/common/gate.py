"""Which cells are worth their time before every merge, by `-m gate`; docs/gate.md has what was measured to choose them.

Each function is a test's: whether it takes a spec.
"""

from __future__ import annotations

from ddpperf.plugin.options.options import Options
from ddpperf.specs import AllReduceSpec, TrainingSpec

LEAST_BYTES = 2**24  # of an all_reduce on GPUs: a smaller one is bound by launches


def scaling(options: Options, spec: TrainingSpec) -> bool:
    """On one device and on all, in the first form: others, and what lies between, tell little more for each second."""
    return (
        spec.world_size in (1, max(options.world_sizes))
        and _first_form(options, spec)
        and spec.model == options.model
    )


def strong_scaling(options: Options, spec: TrainingSpec) -> bool:
    """On all GPUs, in the first form; on a CPU its t(1) costs more than it tells, and its t(N) is weak scaling's, too."""
    return (
        options.device == "cuda"
        and spec.world_size == max(options.world_sizes)
        and _first_form(options, spec)
    )


def strategies(options: Options, spec: TrainingSpec) -> bool:
    """On all devices, in the first form; on a CPU without FSDP, whose process sets differ too much."""
    return _first_form(options, spec) and (options.device == "cuda" or spec.strategy != "fsdp")


def reduced_precision(options: Options, spec: TrainingSpec) -> bool:
    """On a CPU, where all other cells are fp32; on GPUs they have fewer bits already."""
    return options.device == "cpu" and spec.precision != options.precision


def large_all_reduce(options: Options, spec: AllReduceSpec) -> bool:
    """On GPUs, of all of them, captured, by NCCL and in mapped memory; gloo's differ by a fifth from one process set to the
    next."""
    largest = spec.world_size == max(options.world_sizes) and spec.nbytes >= LEAST_BYTES
    chosen = spec.algorithm == "backend" or (spec.algorithm == "two_shot" and spec.in_place)
    return options.device == "cuda" and largest and spec.captured and chosen


def _first_form(options: Options, spec: TrainingSpec) -> bool:
    left_out = {"data_parallel", "own_ddp"} - {options.spec_fields.get("strategy")}
    return spec.execution == options.executions[0] and spec.strategy not in left_out
