"""Functions that select the tests of the gate, a short benchmark that runs before every merge.

`-m gate` runs the gate, and docs/comparing.md explains the selection. Each function belongs to one test
function and returns whether the gate measures a spec of that test function.
"""

from __future__ import annotations

from ddpperf.plugin.options.options import Options
from ddpperf.specs import AllReduceSpec, TrainingSpec

LEAST_BYTES = 2**24  # on GPUs, the CPU's launches limit all-reduces of fewer bytes


def scaling(options: Options, spec: TrainingSpec) -> bool:
    """Return whether a weak-scaling test belongs to the benchmark that runs before every merge.

    The gate runs it on one device and on all devices, in the first execution mode of --executions.
    """
    return (
        spec.world_size in (1, max(options.world_sizes))
        and _first_execution(options, spec)
        and spec.model == options.model
    )


def strong_scaling(options: Options, spec: TrainingSpec) -> bool:
    """Return whether a strong-scaling test belongs to the benchmark that runs before every merge.

    The gate runs it on all GPUs, in the first execution mode of --executions. On a CPU the gate
    leaves it out, because weak scaling measures the same step there.
    """
    return (
        options.device == "cuda"
        and spec.world_size == max(options.world_sizes)
        and _first_execution(options, spec)
    )


def strategies(options: Options, spec: TrainingSpec) -> bool:
    """Return whether a strategy's test belongs to the benchmark that runs before every merge.

    The gate runs the first execution mode of --executions. On a CPU it leaves out FSDP, whose step
    time differs too much between process sets.
    """
    return _first_execution(options, spec) and (options.device == "cuda" or spec.strategy != "fsdp")


def reduced_precision(options: Options, spec: TrainingSpec) -> bool:
    """Return whether a test of a precision belongs to the benchmark that runs before every merge.

    The gate runs reduced precision on a CPU only, where every other test computes in fp32.
    """
    return options.device == "cpu" and spec.precision != options.precision


def large_all_reduce(options: Options, spec: AllReduceSpec) -> bool:
    """Return whether an all-reduce test belongs to the benchmark that runs before every merge.

    The gate runs large all-reduces in a CUDA graph on all GPUs, by NCCL and by the two_shot
    algorithm. On a CPU it runs none, because gloo's times differ by a fifth between process sets.
    """
    largest = spec.world_size == max(options.world_sizes) and spec.nbytes >= LEAST_BYTES
    chosen = spec.algorithm == "backend" or (spec.algorithm == "two_shot" and spec.in_place)
    return options.device == "cuda" and largest and spec.captured and chosen


def _first_execution(options: Options, spec: TrainingSpec) -> bool:
    left_out = {"data_parallel", "own_ddp"} - {options.spec_fields.get("strategy")}
    return spec.execution == options.executions[0] and spec.strategy not in left_out
