"""Step breakdown: how long is each part of a training step, and how busy is the GPU?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from operator import truediv
from statistics import median

import pytest

from ddpperf.analysis.batch_size import LEAST_FRACTION
from ddpperf.analysis.breakdown import (
    least_waiting_rank,
    mfu,
    part_speedups,
    parts_without_waiting,
    peak_flops_per_second,
    straggler_spread,
)
from ddpperf.plugin.cases import Case, case, if_measured_as, if_valid, size_id, skipped, without_torchvision
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import (
    PARTS,
    EpochPartsSpec,
    EpochSpec,
    Execution,
    PartsSpec,
    TrainingSpec,
    measured_as,
)
from perf.common.by_set import by_rank, per_set
from perf.common.step_metrics import cost_metrics, training_metrics
from perf.common.step_specs import measured_also_as, resnet50, resnet50_step, training

AGREEMENT = 0.02  # the sum of the parts may differ from the step by this fraction without a note
CPU_EPOCH_STEPS = 4  # on all ranks, in an epoch of test_epoch_breakdown without --epoch-images


def steps(options: Options) -> Iterator[Case]:
    """Yield training specs for each world size and batch size in the first execution mode.

    The smallest batch size is measured in eager mode, too. On GPUs the core suite has the first
    mode on one device and on all devices, with the smallest and the largest batch.
    """
    ends = (1, max(options.world_sizes))
    extremes = (min(options.batch_sizes), max(options.batch_sizes))
    for world_size in options.world_sizes:
        for batch_size in options.batch_sizes:
            too = ("eager",) if batch_size == min(options.batch_sizes) else ()
            for execution in dict.fromkeys((options.executions[0], *too)):
                step = measured_also_as(PartsSpec, options, world_size, batch_size, execution)
                chosen = world_size in ends and batch_size in extremes
                first = execution == options.executions[0]
                yield case(step, core=options.device == "cpu" or (chosen and first))
    for step in resnet50(options, partial(resnet50_step, PartsSpec, options)):
        yield case(step, core=False)


@pytest.mark.specs(cases=steps)
def test_step_breakdown(measure: Measure, spec: TrainingSpec) -> None:
    """How long is each part of a training step, such as the forward pass and the backward pass?"""
    step = measure(spec)
    spec = dataclasses.replace(spec, delay_seconds=0.0)  # a delay is no part of the step
    parts = measure.reference("parts", measured_as(PartsSpec, spec))
    seconds = measure.reference("step", spec).median_step_seconds()
    part_metrics(measure, least_waiting_parts(parts))
    compared_with_marks(measure, parts, seconds)
    if bound := step.launch_bound():
        measure.metric("gpu_busy_fraction", per_set(lambda ratio: min(1.0, 1 / ratio), bound))
    if peak := peak_flops_per_second(measure.machine.gpu, spec.precision):
        used = per_set(lambda flops, t: mfu(flops, t, peak), parts.counter("flops"), seconds)
        measure.metric("mfu", used)
    if spec.world_size > 1 and spec.strategy == "ddp":
        alone = measure.reference("no_sync", spec.no_sync())
        measure.metric("straggler_spread", per_set(straggler_spread, by_rank(alone)))
    costs(measure, step)
    training_metrics(measure, step)


def loader_epochs(options: Options) -> Iterator[Case]:
    """Yield epochs with a DataLoader, on one device and on all devices.

    The DataLoader has no workers, or several. The steps run in the first execution mode. With
    several workers they also run in eager mode.
    """
    for world_size in dict.fromkeys((1, max(options.world_sizes))):
        yield from (loader_epoch(options, world_size, workers) for workers in loader_workers(options))
        if options.executions[0] != "eager":
            yield loader_epoch(options, world_size, max(loader_workers(options)), "eager")


def loader_epoch(options: Options, world_size: int, workers: int, execution: Execution | None = None) -> Case:
    """Return an epoch with a DataLoader, or a skipped test if it cannot be measured by parts.

    execution: the first execution mode of --executions by default.
    """
    execution = execution or options.executions[0]
    batch_size = loader_batch_size(options)
    identity = f"{size_id(options, world_size, batch_size)}-{execution}-dataloader{workers}"
    fields = training(options, world_size, batch_size, execution)
    fields |= {"input": "dataloader", "loader_workers": workers, "epoch_images": loader_epoch_images(options)}
    epoch = if_valid(identity, options.epoch, **fields)
    if isinstance(epoch, EpochSpec):
        epoch = without_torchvision(epoch, "input dataloader")
    return case(if_measured_as(EpochPartsSpec, epoch), core=False)


def loader_workers(options: Options) -> tuple[int, int]:
    return (0, 8) if options.device == "cuda" else (0, 1)


def loader_batch_size(options: Options) -> int:
    """Return the batch size per rank of the epochs with a DataLoader, small on the slow CPU."""
    return (max if options.device == "cuda" else min)(options.batch_sizes)


def loader_epoch_images(options: Options) -> int:
    """Return the images of an epoch with a DataLoader: on a CPU, a few steps unless they are given."""
    if options.device == "cuda" or options.requested_epoch_images is not None:
        return options.epoch_images
    few = CPU_EPOCH_STEPS * max(options.world_sizes) * loader_batch_size(options)
    return min(options.epoch_images, few)


@pytest.mark.specs(cases=loader_epochs)
def test_epoch_breakdown(measure: Measure, spec: EpochSpec) -> None:
    """How long does each step of an epoch wait for the DataLoader, and how long are its other parts?"""
    epoch = measure(spec)
    spec = dataclasses.replace(spec, delay_seconds=0.0)  # a delay is no part of the step
    parts = measure.reference("parts", measured_as(EpochPartsSpec, spec))
    by_part = least_waiting_parts(parts)
    part_metrics(measure, by_part)
    measure.metric("loading_wait_seconds", parts.counter("loading_wait_seconds"))
    compared_with_marks(measure, parts, measure.reference("epoch", spec).median_step_seconds())
    if median(found["loading"] / sum(found.values()) for found in by_part.values()) >= LEAST_FRACTION:
        measure.warn("loading limits the epoch")
    training_metrics(measure, epoch)


def weak_parts(options: Options) -> Iterator[Case]:
    """Yield steps on several devices for each batch size per rank, and epochs with a DataLoader."""
    several = [N for N in options.world_sizes if N > 1]
    if not several:
        yield one_device_only(options)
    for world_size in several:
        for batch_size in options.batch_sizes:
            step = measured_also_as(PartsSpec, options, world_size, batch_size, options.executions[0])
            yield case(step, core=False)
        yield from (loader_epoch(options, world_size, workers) for workers in loader_workers(options))


def strong_parts(options: Options) -> Iterator[Case]:
    """Yield steps on several devices for each global batch size, and epochs with a DataLoader.

    A global batch size that does not divide over the ranks is skipped.
    """
    several = [N for N in options.world_sizes if N > 1]
    if not several:
        yield one_device_only(options)
    for world_size in several:
        for images in options.global_batch_sizes:
            if images % world_size == 0:
                batch_size = images // world_size
                step = measured_also_as(PartsSpec, options, world_size, batch_size, options.executions[0])
                yield case(step, core=False)
            else:
                identity = f"{size_id(options, world_size)}-global_b{images}"
                reason = f"a global batch of {images} does not divide over {world_size} ranks"
                yield skipped(identity, reason)
        yield from (loader_epoch(options, world_size, workers) for workers in loader_workers(options))


def one_device_only(options: Options) -> Case:
    """Return a skipped test outside of the core suite."""
    skip = pytest.mark.skip(reason="a speedup needs several devices; pass --world-sizes 1,2")
    return pytest.param(None, id=size_id(options, 1), marks=(skip, pytest.mark.slow))


@pytest.mark.specs(cases=weak_parts)
def test_weak_parts_speedup(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster is each part of a step on N devices, with a constant batch size per rank?"""
    store_part_speedups(measure, spec, weak=True)


@pytest.mark.specs(cases=strong_parts)
def test_strong_parts_speedup(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster is each part of a step on N devices, with a constant global batch size?"""
    store_part_speedups(measure, spec, weak=False)


def store_part_speedups(measure: Measure, spec: TrainingSpec, *, weak: bool) -> None:
    """Store the seconds of each step part on one device and on N devices, and their speedups."""
    measure(spec)
    kind = EpochPartsSpec if isinstance(spec, EpochSpec) else PartsSpec
    batch_size = spec.per_rank_batch_size if weak else spec.global_batch_size
    alone = dataclasses.replace(spec.one_device(), per_rank_batch_size=batch_size)
    parts = measure.reference("parts", measured_as(kind, spec))
    on_one = parts_on_one_device(measure.reference("parts_on_one_device", measured_as(kind, alone)), spec)
    on_many = least_waiting_parts(parts)
    part_metrics(measure, on_many)
    speedups = per_set(partial(part_speedups, N=spec.world_size, weak=weak), on_one, on_many)
    part_metrics(measure, on_one, "{}_seconds_on_one_device")
    part_metrics(measure, speedups, "{}_speedup")


def parts_on_one_device(alone: Measured, spec: TrainingSpec) -> dict[str, dict[str, float]]:
    """Return the seconds of each step part on the slowest of the devices, for each process set.

    alone: the parts on each of the devices of `spec`, which worked in turn.
    """
    found = {}
    for sample in alone.samples:
        seconds = alone.rank_step_seconds(sample, spec.world_size)
        slowest = seconds.index(max(seconds))
        found[sample.set] = {
            part: by_rank[slowest] for part, by_rank in parts_of(sample, spec.world_size).items()
        }
    return found


def least_waiting_parts(parts: Measured) -> dict[str, dict[str, float]]:
    """Return the seconds of each step part on the rank that waits least, for each process set."""
    world_size = parts.spec.world_size
    return {sample.set: parts_without_waiting(parts_of(sample, world_size)) for sample in parts.samples}


def part_metrics(
    measure: Measure, parts: Mapping[str, Mapping[str, float]], name: str = "{}_seconds"
) -> None:
    """Store a value of each part of a training step, such as its seconds on each process set.

    name: the metric's name, with {} for the name of the part.
    """
    for part in PARTS:
        if by_set := {of_set: by_part[part] for of_set, by_part in parts.items() if part in by_part}:
            measure.metric(name.format(part), by_set)


def compared_with_marks(measure: Measure, parts: Measured, seconds: Mapping[str, float]) -> None:
    """Compare the sum of the parts with their step or epoch, and that with the one without marks.

    seconds: the time of the step or epoch without marks, for each process set.
    """
    measure.metric(
        "parts_over_step", {sample.set: parts_over_step(parts, sample) for sample in parts.samples}
    )
    measure.metric("marked_over_step", per_set(truediv, parts.median_step_seconds(), seconds))
    if abs(apart := measure.metrics["parts_over_step"]["value"] - 1) > AGREEMENT:
        measure.note(f"the sum of the parts differs from the step they were timed in by {apart:+.1%}")


def parts_over_step(parts: Measured, sample: Sample) -> float:
    """Return the sum of the times of a step's parts, divided by the step time on the same rank.

    The rank is the one that waits least for other ranks. The step time of an epoch is its mean.
    """
    spec = parts.spec
    by_part = parts_of(sample, spec.world_size)
    own = parts.rank_step_seconds(sample)[least_waiting_rank(by_part)]
    steps = spec.steps_per_epoch if isinstance(spec, EpochSpec) else 1
    return steps * sum(parts_without_waiting(by_part).values()) / own


def parts_of(sample: Sample, ranks: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each part of a training step, such as "forward", on each rank."""
    found = {part: sample.counters.get(f"{part}_seconds", ()) for part in PARTS}
    return {part: seconds[:ranks] for part, seconds in found.items() if seconds}


def costs(measure: Measure, step: Measured) -> None:
    """Store the device-seconds of an epoch on N devices, compared with an epoch on one device.

    The metrics are the device-seconds and, on several devices, the time saved and the extra
    device-seconds.
    """
    spec = step.spec
    assert isinstance(spec, TrainingSpec)
    t1 = tN = step.median_step_seconds()
    if spec.world_size > 1:
        one_device = measure.reference("one_device", spec.one_device())
        t1 = one_device.slowest_device_seconds(spec.world_size)
    steps = spec.images_per_epoch / spec.per_rank_batch_size  # on one device
    T1 = per_set(lambda t: steps * t, t1)
    TN = per_set(lambda t: spec.steps_per_epoch * t, tN)
    cost_metrics(measure, T1, TN, spec.world_size)
