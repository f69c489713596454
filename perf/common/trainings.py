"""The training steps of several experiments: by ranks, batch size and form, with DDP's fastest options where it is captured."""

from __future__ import annotations

from functools import partial
from typing import Any

from ddpperf.plugin.cases import Case, fastest_ddp, if_measured_as, if_valid, size_id
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import Execution, TrainingSpec
from ddpperf.specs.instruments import Kind
from ddpperf.specs.strategy import CAPTURED_EXECUTIONS


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
    return fields | fastest_ddp(options)


def measured_apart(
    kind: type[Kind], options: Options, world_size: int, batch_size: int, execution: Execution
) -> Case:
    """The step, skipped where `kind`, another measurement of it that its test needs, cannot be made of it."""
    identity = f"{size_id(options.device, world_size, batch_size)}-{execution}"
    return if_measured_as(kind, if_valid(identity, partial(step, options, world_size, batch_size, execution)))


def fewer(measure: Measure, spec: TrainingSpec) -> list[int]:
    """The numbers of devices that the run has between one and the spec's, the most first: after a smaller group had its memory
    mapped, a larger one needs fresh sets, which a test's own measurements must not be of."""
    return [N for N in reversed(measure.machine.world_sizes) if 1 < N < spec.world_size]
