"""The cases of training steps that several experiments share, and the world sizes of laws and projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from ddpperf.plugin.cases import Case, case, fastest_ddp, if_valid, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import Execution, Model, TrainingSpec, measured_as
from ddpperf.specs.instruments import Kind
from ddpperf.specs.training_step import CAPTURED_EXECUTIONS

RESNET50: tuple[Model, ...] = ("resnet50", "resnet50_cifar")  # with the stem for ImageNet and for CIFAR
RESNET50_BATCH = 128  # images per rank


def step_case(
    options: Options,
    world_size: int,
    batch_size: int,
    execution: Execution | None = None,
    *,
    epoch: bool = False,
    kind: type[Kind] | None = None,
    name: str = "",
    **fields: Any,
) -> Case:
    """Return the spec of a training step or an epoch, or a skipped case with the reason.

    A step in a CUDA graph on several devices gets the fastest options of DDP. Other fields of the
    spec replace these and the defaults of the options.
    batch_size: images per rank. execution: the first one of --executions by default. kind: the spec
    class of an instrument that measures the step, too, such as PartsSpec. name: what distinguishes
    the id of a skipped case, besides the devices.
    """
    execution = execution or options.executions[0]
    captured = world_size > 1 and execution in CAPTURED_EXECUTIONS
    fields = {"input": options.input, **(fastest_ddp(options) if captured else {}), **fields}
    fields |= {"world_size": world_size, "per_rank_batch_size": batch_size, "execution": execution}
    identity = f"{size_id(options, world_size)}-{name or f'b{batch_size}-{execution}'}"
    found = if_valid(identity, options.epoch if epoch else options.step, **fields)
    if kind is not None and isinstance(found, TrainingSpec):
        try:
            measured_as(kind, found)
        except ValueError as error:
            return skipped(found, str(error))
    return found


def global_batch_case(options: Options, world_size: int, images: int, **fields: Any) -> Case:
    """Return the spec of a training step with a global batch size, or a skipped case.

    fields: further arguments of `step_case`.
    """
    name = f"global_b{images}"
    if images % world_size:
        reason = f"a global batch of {images} does not divide over {world_size} ranks"
        return skipped(f"{size_id(options, world_size)}-{name}", reason)
    return step_case(options, world_size, images // world_size, name=name, **fields)


def one_process(options: Options, N: int, batch_size: int, *, core: bool) -> Iterator[Case]:
    """Yield a step of torch's DataParallel, in which one process drives all devices, if there are several."""
    if N > 1:
        name = f"b{batch_size}-data_parallel"
        step = step_case(options, N, batch_size, "eager", name=name, strategy="data_parallel")
        yield case(step, core=core)


def resnet50(options: Options, kind: type[Kind] | None = None, *, least: int = 1) -> Iterator[Case]:
    """Yield steps of ResNet-50 on one device and on all devices, outside of the core suite.

    Nothing is yielded if --model names a model. On a CPU they are skipped.
    kind: as in `step_case`. least: the least number of devices.
    """
    if "--model" in options.given or options.model not in get_args(Model):
        return
    if options.device == "cpu":
        yield skipped("resnet50", "a step of resnet50 takes seconds on a CPU; --model resnet50 measures it")
        return
    other_images = options.data.image_size != (32, 32) or options.data.classes > 10
    for model in RESNET50:
        for world_size in sorted({1, max(options.world_sizes)}):
            if world_size < least:
                continue
            if model.endswith("_cifar") and other_images:
                reason = f"{model} takes images of 32x32 in 10 classes, the data set has others"
                yield skipped(f"{size_id(options, world_size)}-{model}", reason)
            else:
                step = step_case(options, world_size, RESNET50_BATCH, kind=kind, name=model, model=model)
                yield case(step, core=False)


def law_world_sizes(options: Options) -> tuple[int, ...]:
    """Return the world sizes to which Amdahl's and Gustafson's laws are fitted.

    On a CPU these are 1, 2 and 4 without --world-sizes, because a fit needs three sizes. The default
    world sizes of a CPU are 1 and 2, so the laws are not in the core suite there.
    """
    if options.device == "cpu" and "--world-sizes" not in options.given and options.nodes == 1:
        return (*options.world_sizes, 2 * max(options.world_sizes))
    return options.world_sizes


def too_few_world_sizes(options: Options, world_sizes: tuple[int, ...]) -> str:
    """Return why a law of scaling cannot be fitted, or an empty string if it can.

    Amdahl's law, Gustafson's law and a projection need measurements on two world sizes above 1.
    """
    if sum(world_size > 1 for world_size in world_sizes) > 1:
        return ""
    found = ", ".join(map(str, world_sizes))
    if options.nodes > 1:
        advice = "a larger --nodes or --node-size"
    else:
        advice = "--world-sizes 1,2,4" + (", which needs 4 GPUs" if options.device == "cuda" else "")
    return f"a fit needs two world sizes above 1, found {found}; pass {advice}"


def fewer(measure: Measure, spec: TrainingSpec) -> list[int]:
    """Return the values of --world-sizes above 1 and below the spec's, largest first.

    After a smaller group of ranks mapped its memory, a larger group would need a new process set.
    """
    return [N for N in reversed(measure.machine.world_sizes) if 1 < N < spec.world_size]
