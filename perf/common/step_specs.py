"""Functions that make the training specs that several experiments share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

from ddpperf.plugin.cases import Case, fastest_ddp, if_measured_as, if_valid, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import Execution, Model, TrainingSpec
from ddpperf.specs.instruments import Kind
from ddpperf.specs.strategy_fields import CAPTURED_EXECUTIONS

RESNET50: tuple[Model, ...] = ("resnet50", "resnet50_cifar")  # with the stem for ImageNet and for CIFAR
RESNET50_BATCH = 128  # images per rank


def step(
    options: Options, world_size: int, batch_size: int, execution: Execution, **fields: Any
) -> TrainingSpec:
    return options.step(**training(options, world_size, batch_size, execution) | fields)


def resnet50(options: Options, case_of: Callable[[Model, int], Case], *, least: int = 1) -> Iterator[Case]:
    """Yield the cases of ResNet-50 on one device and on all devices, unless --model names a model.

    On a CPU they are skipped. case_of: returns the case of a model on a number of devices. least: the
    least number of devices.
    """
    if "--model" in options.given or options.model not in get_args(Model):
        return
    if options.device == "cpu":
        yield skipped("resnet50", "a step of resnet50 takes seconds on a CPU; --model resnet50 measures it")
        return
    for model in RESNET50:
        for world_size in sorted({1, max(options.world_sizes)}):
            if world_size < least:
                continue
            if model.endswith("_cifar") and (
                options.data.image_size != (32, 32) or options.data.classes > 10
            ):
                reason = f"{model} takes images of 32x32 in 10 classes, the data set has others"
                yield skipped(f"{size_id(options, world_size)}-{model}", reason)
            else:
                yield case_of(model, world_size)


def resnet50_step(kind: type[Kind], options: Options, model: Model, world_size: int) -> Case:
    """Return the training spec of a ResNet-50 in the first execution mode, or a skipped test.

    kind: the spec class of the instrument that measures it, too.
    """
    execution = options.executions[0]
    return measured_also_as(kind, options, world_size, RESNET50_BATCH, execution, model=model)


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
    kind: type[Kind],
    options: Options,
    world_size: int,
    batch_size: int,
    execution: Execution,
    **fields: Any,
) -> Case:
    """Return a training spec that can also be measured by an instrument, or a skipped test.

    kind: the instrument's spec class, such as PartsSpec. The skipped test gives the reason.
    """
    identity = f"{size_id(options, world_size, batch_size)}-{execution}"
    return if_measured_as(
        kind, if_valid(identity, step, options, world_size, batch_size, execution, **fields)
    )


def law_world_sizes(options: Options) -> tuple[int, ...]:
    """Return the world sizes to which Amdahl's and Gustafson's laws are fitted.

    On a CPU these are 1, 2 and 4 without --world-sizes, because a fit needs three sizes. The default
    world sizes of a CPU are 1 and 2, so the laws are not in the core suite there.
    """
    if options.device == "cpu" and "--world-sizes" not in options.given and options.nodes.count == 1:
        return (*options.world_sizes, 2 * max(options.world_sizes))
    return options.world_sizes


def too_few_world_sizes(options: Options, world_sizes: tuple[int, ...]) -> str:
    """Return why a law of scaling cannot be fitted, or an empty string if it can.

    Amdahl's law, Gustafson's law and a projection need measurements on two world sizes above 1.
    """
    if sum(world_size > 1 for world_size in world_sizes) > 1:
        return ""
    found = ", ".join(map(str, world_sizes))
    if options.nodes.count > 1:
        advice = "a larger --nodes or --node-size"
    else:
        advice = "--world-sizes 1,2,4" + (", which needs 4 GPUs" if options.device == "cuda" else "")
    return f"a fit needs two world sizes above 1, found {found}; pass {advice}"


def fewer(measure: Measure, spec: TrainingSpec) -> list[int]:
    """Return the values of --world-sizes above 1 and below the spec's, largest first.

    After a smaller group of ranks mapped its memory, a larger group would need a new process set.
    """
    return [N for N in reversed(measure.machine.world_sizes) if 1 < N < spec.world_size]
