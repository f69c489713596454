"""Functions that select the core suite, which `pytest perf/` runs without --full.

Each function belongs to one test function and returns whether the core suite measures a spec of
that test function. The core suite has at least one case of every experiment. It leaves out what is
expensive and seldom changes: sweeps over sizes, compiling, and whole trainings.
"""

from __future__ import annotations

from ddpperf.plugin.options.options import Options
from ddpperf.specs import (
    AllReduceSpec,
    CollectiveSpec,
    EpochSpec,
    RunSpec,
    SamplerSpec,
    TrainingSpec,
    is_custom_model,
)
from perf.common import gate
from perf.common.calls import largest_of_all
from perf.common.recipes import read_recipes
from perf.common.trainings import RESNET50

SELDOM_CHANGED = ("fp16", "powersgd")  # DDP's hooks that few trainings use


def never(options: Options, spec: object) -> bool:
    """Select no case for the core suite, because all cases of the test are expensive."""
    del options, spec
    return False


# --- collectives


def all_reduce(options: Options, spec: AllReduceSpec) -> bool:
    """Return whether an all-reduce test belongs to the core suite.

    The core suite runs NCCL or gloo at all sizes, and the other algorithms at one large size.
    """
    if spec.world_size != max(options.world_sizes) or not spec.in_place:
        return False
    at_one_size = spec.nbytes == largest_of_all(options.links)
    return spec.algorithm == "backend" or at_one_size or gate.large_all_reduce(options, spec)


def collective(options: Options, spec: CollectiveSpec) -> bool:
    """Return whether a collective's test has all ranks and the one large size of the core suite.

    The size of a collective is rounded down to whole elements for each rank.
    """
    size = largest_of_all(options.links)
    return spec.world_size == max(options.world_sizes) and size - 4 * spec.world_size < spec.nbytes <= size


def fastest_all_reduce(options: Options, spec: AllReduceSpec) -> bool:
    """Return whether the comparison of algorithms has all ranks and the core suite's one size."""
    return spec.world_size == max(options.world_sizes) and spec.nbytes == largest_of_all(options.links)


def backend_model(options: Options, spec: AllReduceSpec) -> bool:
    """Return whether a cost model of NCCL or gloo is that of all ranks."""
    return spec.world_size == max(options.world_sizes)


# --- training steps on one device


def batch_size(options: Options, spec: EpochSpec) -> bool:
    """Return whether an epoch of the batch size experiment belongs to the core suite.

    The images are on the device. On a CPU the core suite has the smallest batch size, on one GPU it
    has all batch sizes. On several GPUs it has only the largest of --batch-sizes, which
    test_epoch_scaling needs, too. Each GPU trains these epochs in turn: all four batch sizes took
    43 s on two H100s.
    """
    if spec.input != ("fixed" if is_custom_model(options.model) else "device"):
        return False
    if options.device == "cuda" and max(options.world_sizes) == 1:
        return True
    extreme = max if options.device == "cuda" else min
    return spec.per_rank_batch_size == extreme(options.batch_sizes)


def execution(options: Options, spec: TrainingSpec) -> bool:
    """Return whether an execution mode's test belongs to the core suite.

    Compiling takes 20 s on a GPU in the first run, so only the largest batch is compiled. If the first of
    --executions is not eager, the eager step is a reference of the other steps, and only the
    smallest batch has a test of it.
    """
    if spec.execution == options.executions[0]:
        return True
    extreme = min if spec.execution == "eager" else max
    return spec.per_rank_batch_size == extreme(options.batch_sizes)


def precision(options: Options, spec: TrainingSpec) -> bool:
    """Return whether a test of a precision belongs to the core suite: on GPUs, the largest batch."""
    return options.device == "cpu" or spec.per_rank_batch_size == max(options.batch_sizes)


def step_breakdown(options: Options, spec: TrainingSpec) -> bool:
    """Return whether the breakdown of a step belongs to the core suite.

    On GPUs the core suite has one device and all devices, the smallest and the largest batch.
    """
    if options.device == "cpu":
        return True
    return (
        spec.world_size in (1, max(options.world_sizes))
        and spec.model == options.model
        and spec.execution == options.executions[0]
        and spec.per_rank_batch_size in (min(options.batch_sizes), max(options.batch_sizes))
    )


# --- training steps on several devices


def weak_scaling(options: Options, spec: TrainingSpec) -> bool:
    """Return whether a weak-scaling test belongs to the core suite.

    On GPUs the first execution mode runs on all devices and on one device with every batch size,
    and on the other numbers of devices with the largest batch size. Other strategies and the eager
    step have one case each. The compiled step runs on one device only.
    """
    if options.device == "cpu":
        return True
    most, largest = max(options.world_sizes), spec.per_rank_batch_size == max(options.batch_sizes)
    ends = spec.world_size in (1, most)
    if spec.model != options.model:
        return ends and spec.model not in RESNET50
    first = spec.execution == options.executions[0]
    if spec.strategy in {"own_ddp"} - {options.spec_fields.get("strategy")}:
        return spec.world_size == most and largest and first
    if spec.execution == "eager" and not first:  # DDP and DataParallel, which are compared
        return spec.world_size == most > 1 and largest
    if not first:
        return spec.world_size == 1
    return (ends or largest) and spec.strategy != "data_parallel"


def strong_scaling(options: Options, spec: TrainingSpec) -> bool:
    """Return whether a strong-scaling test belongs to the core suite.

    On GPUs the core suite leaves out DataParallel, and has all numbers of devices for the largest
    global batch size.
    """
    if options.device == "cpu":
        return True
    if spec.strategy == "data_parallel":
        return False
    return spec.world_size in (1, max(options.world_sizes)) or spec.global_batch_size == max(
        options.global_batch_sizes
    )


def epoch_scaling(options: Options, spec: EpochSpec) -> bool:
    """Return whether an epoch's test is that of DDP on all devices, or of the only device.

    On several devices the epoch has the first execution mode, because compiling a DDP step and the
    step of one device took 24 s on two H200s.
    """
    ours = {"own_ddp"} - {options.spec_fields.get("strategy")}
    most = max(options.world_sizes)
    mode = options.executions[0] if most > 1 else options.fastest_execution
    return spec.world_size == most and spec.strategy not in ours and spec.execution == mode


def gustafson(options: Options, spec: TrainingSpec) -> bool:
    """Return whether Gustafson's law is fitted at the largest batch size per rank.

    On a CPU the law needs more ranks than the other tests of the core suite.
    """
    return _has_its_ranks(options, spec) and spec.per_rank_batch_size == max(options.batch_sizes)


def amdahl(options: Options, spec: TrainingSpec) -> bool:
    """Return whether Amdahl's law is fitted at the largest global batch size."""
    return _has_its_ranks(options, spec) and spec.global_batch_size == max(options.global_batch_sizes)


def _has_its_ranks(options: Options, spec: TrainingSpec) -> bool:
    """Return whether the process sets of the core suite have enough ranks for a spec."""
    return spec.world_size <= max(options.world_sizes)


def projection(options: Options, spec: TrainingSpec) -> bool:
    """Return whether the projection is that of the largest batch size."""
    return spec.per_rank_batch_size == max(options.batch_sizes)


def comm_split(options: Options, spec: TrainingSpec) -> bool:
    """Return whether the communication of a step is measured in the core suite.

    The core suite has all devices, the first execution mode and the largest batch.
    """
    return (
        spec.world_size == max(options.world_sizes)
        and spec.model == options.model
        and spec.execution == options.executions[0]
        and spec.per_rank_batch_size == max(options.batch_sizes)
    )


def strategies(options: Options, spec: TrainingSpec) -> bool:
    """Return whether a strategy's test belongs to the core suite.

    On GPUs the core suite leaves out the DDP options that are seldom used.
    """
    if options.device == "cpu":
        return True
    mapped = spec.strategy == "ddp" and spec.comm_hook == "symmetric_memory"
    return not (mapped or spec.comm_hook in SELDOM_CHANGED or spec.static_graph or spec.sync_batch_norm)


def sampler(options: Options, spec: SamplerSpec) -> bool:
    """Return whether the shards of an epoch are those of all ranks."""
    return spec.world_size == max(options.world_sizes)


# --- whole trainings


def large_batch(options: Options, spec: RunSpec) -> bool:
    """Return whether a training is the one with the first recipe, which needs no other training."""
    first, *_ = read_recipes(options.device)
    return spec == first.spec(options)
