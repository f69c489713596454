"""Step breakdown: how long is each part of a training step, and how busy is the GPU?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from operator import truediv
from statistics import median
from typing import Any

import pytest

from ddpperf.analysis.batch_size import LEAST_FRACTION
from ddpperf.analysis.gpu_data_sheets import peak_flops_per_second
from ddpperf.analysis.scaling import part_speedups
from ddpperf.plugin.cases import Case, case, size_id
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import PARTS, EpochPartsSpec, EpochSpec, Execution, PartsSpec, TrainingSpec, measured_as
from perf.common.by_set import by_rank, per_set
from perf.common.step_metrics import cost_metrics, training_metrics
from perf.common.step_specs import global_batch_case, resnet50, step_case

AGREEMENT = 0.02  # the sum of the parts may differ from the step by this fraction without a note
MOST_MARKING = 0.1  # timing the parts may lengthen the step by this fraction without a warning
CPU_EPOCH_STEPS = 4  # on all ranks, in an epoch of test_epoch_breakdown without --epoch-images


def steps(options: Options) -> Iterator[Case]:
    """Yield training specs for each world size and batch size in the first execution mode.

    The smallest batch size is measured in eager mode, too. On GPUs the core suite has the first
    mode on one device and on all devices, with the smallest and the largest batch.
    """
    first, on_cpu = options.executions[0], options.device == "cpu"
    ends = (1, max(options.world_sizes))
    smallest, largest = min(options.batch_sizes), max(options.batch_sizes)
    for N, batch_size in product(options.world_sizes, options.batch_sizes):
        too: tuple[Execution, ...] = ("eager",) if batch_size == smallest else ()
        for execution in dict.fromkeys((first, *too)):
            core = N in ends and batch_size in (smallest, largest) and execution == first
            yield case(step_case(options, N, batch_size, execution, kind=PartsSpec), core=on_cpu or core)
    yield from resnet50(options, PartsSpec)


@pytest.mark.specs(cases=steps)
def test_step_breakdown(measure: Measure, spec: TrainingSpec) -> None:
    """How long is each part of a training step, such as the forward pass and the backward pass?"""
    step, one_device = measure(spec), spec.one_device()
    training_metrics(measure, step)
    spec = dataclasses.replace(spec, delay_seconds=0.0)  # a delay is no part of the step
    parts = measure.reference("parts", measured_as(PartsSpec, spec))
    seconds = measure.reference("step", spec).median_step_seconds()
    part_metrics(measure, least_waiting_parts(parts))
    compared_with_marks(measure, parts, seconds)
    if bound := step.launch_bound():
        measure.metric("gpu_busy_fraction", per_set(lambda ratio: min(1.0, 1 / ratio), bound))
    if peak := peak_flops_per_second(measure.machine.gpu, spec.precision):
        # The fraction of the peak that forward and backward pass need (PaLM, 2022, appendix B)
        measure.metric("mfu", per_set(lambda flops, t: flops / (t * peak), parts.counter("flops"), seconds))
    if spec.world_size > 1 and spec.strategy == "ddp":
        alone = measure.reference("no_sync", spec.no_sync())
        # No rank of these steps waits for another, so a straggler's step is longer than the others'.
        measure.metric("straggler_spread", per_set(lambda t: max(t) / min(t) - 1, by_rank(alone)))
    t1 = tN = step.median_step_seconds()
    if spec.world_size > 1:
        t1 = measure.reference("one_device", one_device).slowest_device_seconds(spec.world_size)
    alone_steps = spec.images_per_epoch / spec.per_rank_batch_size  # of an epoch on one device
    T1 = per_set(lambda t: alone_steps * t, t1)
    cost_metrics(measure, T1, per_set(lambda t: spec.steps_per_epoch * t, tN), spec.world_size)


def loader_epochs(options: Options) -> Iterator[Case]:
    """Yield epochs with a DataLoader, on one device and on all devices."""
    for N in dict.fromkeys((1, max(options.world_sizes))):
        yield from loader_epochs_on(options, N, "eager")


def loader_epochs_on(options: Options, N: int, *executions: Execution) -> Iterator[Case]:
    """Yield epochs with a DataLoader that has no workers, or several.

    The steps run in the first execution mode, and with several workers also in other `executions`.
    On a CPU, which is slow, the batch is small, and an epoch has a few steps unless --epoch-images
    is given.
    """
    on_gpus, first = options.device == "cuda", options.executions[0]
    batch_size = (max if on_gpus else min)(options.batch_sizes)
    images = options.epoch_images
    if not on_gpus and options.requested_epoch_images is None:
        images = min(images, CPU_EPOCH_STEPS * max(options.world_sizes) * batch_size)
    several = 8 if on_gpus else 1
    steps = [(0, first), (several, first), *((several, other) for other in executions)]
    for workers, execution in dict.fromkeys(steps):
        loader: dict[str, Any] = {"input": "dataloader", "loader_workers": workers, "epoch_images": images}
        loader["name"] = f"b{batch_size}-{execution}-dataloader{workers}"
        epoch = step_case(options, N, batch_size, execution, epoch=True, kind=EpochPartsSpec, **loader)
        yield case(epoch, core=False)


@pytest.mark.specs(cases=loader_epochs)
def test_epoch_breakdown(measure: Measure, spec: EpochSpec) -> None:
    """How long does each step of an epoch wait for the DataLoader, and how long are its other parts?"""
    epoch = measure(spec)
    training_metrics(measure, epoch)
    spec = dataclasses.replace(spec, delay_seconds=0.0)  # a delay is no part of the step
    parts = measure.reference("parts", measured_as(EpochPartsSpec, spec))
    by_part = least_waiting_parts(parts)
    part_metrics(measure, by_part)
    compared_with_marks(measure, parts, measure.reference("epoch", spec).median_step_seconds())
    if median(found["loading"] / sum(found.values()) for found in by_part.values()) >= LEAST_FRACTION:
        measure.warn("loading limits the epoch")


def on_several_devices(options: Options, *, weak: bool) -> Iterator[Case]:
    """Yield steps and epochs for each world size above 1, outside of the core suite.

    weak: whether the steps have each batch size per rank, instead of each global batch size.
    """
    if max(options.world_sizes) == 1:
        skip = pytest.mark.skip(reason="a speedup needs several devices; pass --world-sizes 1,2")
        yield pytest.param(None, id=size_id(options, 1), marks=(skip, pytest.mark.slow))
    step_of = step_case if weak else global_batch_case
    for N in options.world_sizes:
        if N > 1:
            for batch_size in options.batch_sizes if weak else options.global_batch_sizes:
                yield case(step_of(options, N, batch_size, kind=PartsSpec), core=False)
            yield from loader_epochs_on(options, N)


@pytest.mark.specs(cases=partial(on_several_devices, weak=True))
def test_weak_parts_speedup(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster is each part of a step on N devices, with a constant batch size per rank?"""
    store_part_speedups(measure, spec, weak=True)


@pytest.mark.specs(cases=partial(on_several_devices, weak=False))
def test_strong_parts_speedup(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster is each part of a step on N devices, with a constant global batch size?"""
    store_part_speedups(measure, spec, weak=False)


def store_part_speedups(measure: Measure, spec: TrainingSpec, *, weak: bool) -> None:
    """Store the seconds of each step part on one device and on N devices, and their speedups.

    The parts on one device are those of the slowest device.
    """
    measure(spec)
    kind, N = EpochPartsSpec if isinstance(spec, EpochSpec) else PartsSpec, spec.world_size
    batch_size = spec.per_rank_batch_size if weak else spec.global_batch_size
    one_device = dataclasses.replace(spec.one_device(), per_rank_batch_size=batch_size)
    on_many = least_waiting_parts(measure.reference("parts", measured_as(kind, spec)))
    alone = measure.reference("parts_on_one_device", measured_as(kind, one_device))
    on_one = {}
    for sample in alone.samples:
        seconds = alone.rank_step_seconds(sample, N)
        on_one[sample.set] = parts_of(sample, seconds.index(max(seconds)))
    part_metrics(measure, on_many)
    part_metrics(measure, on_one, "{}_seconds_on_one_device")
    speedups = per_set(partial(part_speedups, N=N, weak=weak), on_one, on_many)
    part_metrics(measure, speedups, "{}_speedup")


def least_waiting_parts(parts: Measured) -> dict[str, dict[str, float]]:
    """Return the seconds of each step part on the rank that waits least, for each process set.

    Steps of synchronized ranks take equally long on all of them.
    """
    world_size = parts.spec.world_size
    return {one.set: parts_of(one, least_waiting_rank(one, world_size)) for one in parts.samples}


def part_metrics(
    measure: Measure, parts: Mapping[str, Mapping[str, float]], name: str = "{}_seconds"
) -> None:
    """Store one metric for each part of a training step, such as forward_seconds.

    name: the metric's name, with {} for the name of the part.
    """
    for part in PARTS:
        if by_set := {of_set: by_part[part] for of_set, by_part in parts.items() if part in by_part}:
            measure.metric(name.format(part), by_set)


def compared_with_marks(measure: Measure, parts: Measured, seconds: Mapping[str, float]) -> None:
    """Compare the sum of the parts with the step time, and the step time with and without marks.

    The marks are the events between the parts. In an epoch, the epoch takes the place of the step.
    seconds: the time of the step or epoch without marks, for each process set.
    """
    measure.metric(
        "parts_over_step", {sample.set: parts_over_step(parts, sample) for sample in parts.samples}
    )
    measure.metric("marked_over_step", per_set(truediv, parts.median_step_seconds(), seconds))
    if (marked := measure.metrics["marked_over_step"]["value"]) > 1 + MOST_MARKING:
        work = "an epoch" if isinstance(parts.spec, EpochSpec) else "a step"
        measure.warn(
            f"{work} takes {marked:.2f} times as long while its parts are timed, so the parts are too long"
        )
    if abs(apart := measure.metrics["parts_over_step"]["value"] - 1) > AGREEMENT:
        measure.note(f"the sum of the parts differs by {apart:+.1%} from the time of the same step")


def parts_over_step(parts: Measured, sample: Sample) -> float:
    """Return the sum of the times of a step's parts, divided by the step time on the same rank.

    The rank is the one that waits least for other ranks. In an epoch, the step time is the mean of
    its steps.
    """
    spec = parts.spec
    rank = least_waiting_rank(sample, spec.world_size)
    steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
    return steps * sum(parts_of(sample, rank).values()) / parts.rank_step_seconds(sample)[rank]


def least_waiting_rank(sample: Sample, world_size: int) -> int:
    """Return the rank with the shortest gradient synchronization."""
    waits = sample.counters.get("gradient_sync_seconds", (0.0,))[:world_size]
    return waits.index(min(waits))


def parts_of(sample: Sample, rank: int) -> dict[str, float]:
    """Return the seconds of each part of a training step on a rank."""
    known = {part: sample.counters.get(f"{part}_seconds") for part in PARTS}
    return {part: seconds[rank] for part, seconds in known.items() if seconds}
