"""Functions that make the training specs that several experiments share."""

from __future__ import annotations

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
    """Return the fields of a training spec for a world size, a batch size and an execution mode.

    A step in a CUDA graph on several devices also gets the fastest options of DDP.
    """
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
    """Return a training spec that can also be measured by an instrument, or a skipped test.

    kind: the instrument's spec class, such as PartsSpec. The skipped test gives the reason.
    """
    identity = f"{size_id(options.device, world_size, batch_size)}-{execution}"
    return if_measured_as(kind, if_valid(identity, step, options, world_size, batch_size, execution))


def law_world_sizes(options: Options) -> tuple[int, ...]:
    """Return the world sizes to which Amdahl's and Gustafson's laws are fitted.

    On a CPU these are 1, 2 and 4 without --world-sizes, because a fit needs three sizes. The default
    world sizes of a CPU are 1 and 2, so the laws are not in the core suite there.
    """
    if options.device == "cpu" and "--world-sizes" not in options.given:
        return (*options.world_sizes, 2 * max(options.world_sizes))
    return options.world_sizes


def too_few_world_sizes(options: Options, world_sizes: tuple[int, ...]) -> str:
    """Return why a law of scaling cannot be fitted, or an empty string if it can.

    Amdahl's law, Gustafson's law and a projection need measurements on two world sizes above 1.
    """
    if sum(world_size > 1 for world_size in world_sizes) > 1:
        return ""
    found = ", ".join(map(str, world_sizes))
    devices = ", which needs 4 GPUs" if options.device == "cuda" else ""
    return f"a fit needs two world sizes above 1, found {found}; pass --world-sizes 1,2,4{devices}"


def fewer(measure: Measure, spec: TrainingSpec) -> list[int]:
    """Return the values of --world-sizes above 1 and below the spec's, largest first.

    After a smaller group of ranks mapped its memory, a larger group would need a new process set.
    """
    return [N for N in reversed(measure.machine.world_sizes) if 1 < N < spec.world_size]
