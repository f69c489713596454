"""Step breakdown: how long is each part of a training step, and how busy is the GPU?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import pytest

from ddpperf.analysis.breakdown import (
    epoch_cost,
    least_waiting_rank,
    mfu,
    parts_without_waiting,
    peak_flops_per_second,
    straggler_spread,
)
from ddpperf.plugin.cases import Case
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import PARTS, Model, PartsSpec, TrainingSpec, measured_as
from perf.common import core
from perf.common.training_metrics import training_metrics
from perf.common.trainings import RESNET50_BATCH, measured_also_as, resnet50

AGREEMENT = 0.02  # the sum of the parts may differ from the step by this fraction without a note


def steps(options: Options) -> Iterator[Case]:
    """Yield training specs for each world size and batch size in the first execution mode.

    The smallest batch size is measured in eager mode, too.
    """
    for world_size in options.world_sizes:
        for batch_size in options.batch_sizes:
            too = ("eager",) if batch_size == min(options.batch_sizes) else ()
            for execution in dict.fromkeys((options.executions[0], *too)):
                yield measured_also_as(PartsSpec, options, world_size, batch_size, execution)
    yield from resnet50(options, partial(deeper, options))


def deeper(options: Options, model: Model, world_size: int) -> Case:
    """Return the training spec of a ResNet-50 in the first execution mode."""
    execution = options.executions[0]
    return measured_also_as(PartsSpec, options, world_size, RESNET50_BATCH, execution, model=model)


@pytest.mark.specs(cases=steps, core=core.step_breakdown)
def test_step_breakdown(measure: Measure, spec: TrainingSpec) -> None:
    """How long is each part of a training step, such as the forward pass and the backward pass?"""
    step = measure(spec)
    spec = dataclasses.replace(spec, delay_seconds=0.0)  # the delay of --slow-down is no part of the step
    parts = measure.reference("parts", measured_as(PartsSpec, spec))
    seconds, marked = measure.reference("step", spec).median_step_seconds(), parts.median_step_seconds()
    found = {sample.set: parts_without_waiting(parts_of(sample, spec.world_size)) for sample in parts.samples}
    for part in PARTS:
        if by_set := {name: by_part[part] for name, by_part in found.items() if part in by_part}:
            measure.metric(f"{part}_seconds", by_set)
    over_step = {sample.set: parts_over_step(parts, sample) for sample in parts.samples}
    measure.metric("parts_over_step", over_step)
    measure.metric("marked_over_step", {name: t / seconds[name] for name, t in marked.items()})
    if abs(apart := measure.metrics["parts_over_step"]["value"] - 1) > AGREEMENT:
        measure.note(f"the sum of the parts differs from the step they were timed in by {apart:+.1%}")
    if bound := step.launch_bound():
        measure.metric("gpu_busy_fraction", {name: min(1.0, 1 / ratio) for name, ratio in bound.items()})
    if peak := peak_flops_per_second(measure.machine.gpu, spec.precision):
        flops = parts.counter("flops")
        measure.metric("mfu", {name: mfu(flops[name], t, peak) for name, t in seconds.items()})
    if spec.world_size > 1:
        if spec.strategy == "ddp":
            alone = measure.reference("no_sync", spec.no_sync())
            ranks = {sample.set: alone.rank_step_seconds(sample) for sample in alone.samples}
            measure.metric("straggler_spread", {name: straggler_spread(t) for name, t in ranks.items()})
        costs(measure, step)
    training_metrics(measure, step)


def parts_over_step(parts: Measured, sample: Sample) -> float:
    """Return the sum of the times of a step's parts, divided by the step time on the same rank.

    The rank is the one that waits least for other ranks.
    """
    by_part = parts_of(sample, parts.spec.world_size)
    own = parts.rank_step_seconds(sample)[least_waiting_rank(by_part)]
    return sum(parts_without_waiting(by_part).values()) / own


def parts_of(sample: Sample, ranks: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each part of a training step, such as "forward", on each rank."""
    found = {part: sample.counters.get(f"{part}_seconds", ()) for part in PARTS}
    return {part: seconds[:ranks] for part, seconds in found.items() if seconds}


def costs(measure: Measure, step: Measured) -> None:
    """Store the device-seconds of an epoch on N devices, compared with an epoch on one device.

    The metrics are the device-seconds, the time saved, and the extra device-seconds.
    """
    spec = step.spec
    assert isinstance(spec, TrainingSpec)
    t1 = measure.reference("one_device", spec.one_device()).slowest_device_seconds(spec.world_size)
    steps = spec.images_per_epoch / spec.per_rank_batch_size  # on one device
    found = {
        name: epoch_cost(steps * t1[name], spec.steps_per_epoch * tN, spec.world_size)
        for name, tN in step.median_step_seconds().items()
    }
    for field in ("device_seconds", "saved_seconds", "extra_device_seconds"):
        measure.metric(f"{field}_per_epoch", {name: cost[field] for name, cost in found.items()})
