"""The training steps that several experiments share."""

from __future__ import annotations

from functools import partial
from typing import Any

from ddpperf.plugin.cases import Case, fastest_ddp, if_measured_as, if_valid, size_id
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import Execution, TrainingSpec
from ddpperf.specs.instruments import Kind
from ddpperf.specs.strategy import CAPTURED_EXECUTIONS


def step(options: Options, world_size: int, batch_size: int, execution: Execution) -> TrainingSpec:
    return options.step(**training(options, world_size, batch_size, execution))


def training(options: Options, world_size: int, batch_size: int, execution: Execution) -> dict[str, Any]:
    """Return the fields of a training; captured on several devices it has DDP's fastest options."""
    fields = {
        "world_size": world_size,
        "per_rank_batch_size": batch_size,
        "execution": execution,
        "input": options.input,
    }
    if world_size == 1 or execution not in CAPTURED_EXECUTIONS:
        return fields
    return fields | fastest_ddp(options)


def measured_also_as(
    kind: type[Kind], options: Options, world_size: int, batch_size: int, execution: Execution
) -> Case:
    """Return the step, skipped if it cannot be measured as `kind`, which its test needs."""
    identity = f"{size_id(options.device, world_size, batch_size)}-{execution}"
    return if_measured_as(kind, if_valid(identity, partial(step, options, world_size, batch_size, execution)))


def fewer(measure: Measure, spec: TrainingSpec) -> list[int]:
    """Return the run's world sizes between one and the spec's, the largest first.

    After a smaller group mapped its memory, a larger one would need a fresh process set.
    """
    return [N for N in reversed(measure.machine.world_sizes) if 1 < N < spec.world_size]
