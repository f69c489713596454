"""The training steps of several experiments: by ranks, batch size and form, with DDP's fastest options where it is captured."""

from __future__ import annotations

from functools import partial
from typing import Any

from ddpperf.plugin.cases import Case, if_measured_as, if_valid
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import Execution, TrainingSpec
from ddpperf.specs.instruments import Kind
from ddpperf.specs.strategy import CAPTURED_EXECUTIONS

# Of what can be captured the fastest: NCCL's own average, gradients that lie in their buckets, BatchNorm's statistics left to
# each rank.
FASTEST_DDP = {"comm_hook": "avg", "gradient_as_bucket_view": True, "buffer_sync": False}
OWN_DDP = {"strategy": "own_ddp", "comm_hook": "symmetric_memory"}  # what the machine can do, to lay beside


def step(options: Options, world_size: int, batch_size: int, execution: Execution) -> TrainingSpec:
    return options.step(**training(options, world_size, batch_size, execution))


def training(options: Options, world_size: int, batch_size: int, execution: Execution) -> dict[str, Any]:
    """A training's fields: alone or by DDP, where it is captured with its fastest options, else as it is by default."""
    fields = {
        "world_size": world_size,
        "per_rank_batch_size": batch_size,
        "execution": execution,
        "input": options.input,
    }
    if world_size == 1 or execution not in CAPTURED_EXECUTIONS:
        return fields
    return fields | (OWN_DDP if options.spec_fields.get("strategy") == "own_ddp" else FASTEST_DDP)


def measured_apart(
    kind: type[Kind], options: Options, world_size: int, batch_size: int, execution: Execution
) -> Case:
    """The step, skipped where `kind`, another measurement of it that its test needs, cannot be made of it."""
    identity = f"world_size={world_size}-batch={batch_size}-{execution}"
    return if_measured_as(kind, if_valid(identity, partial(step, options, world_size, batch_size, execution)))


def fewer(measure: Measure, spec: TrainingSpec) -> list[int]:
    """The numbers of devices that the run has between one and the spec's, the most first: after a smaller group had its memory
    mapped, a larger one needs fresh sets, which a test's own measurements must not be of."""
    return [N for N in reversed(measure.machine.world_sizes) if 1 < N < spec.world_size]
