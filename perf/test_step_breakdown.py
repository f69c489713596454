"""Step breakdown: which part of a step takes how long, what of the hardware is used, and what do more devices save and cost?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

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
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured, Sample
from ddpperf.specs import PARTS, PartsSpec, TrainingSpec, measured_as
from perf.common.metrics import training_metrics
from perf.common.trainings import measured_apart

AGREEMENT = 0.02  # of a step, that its parts' sum may differ from it without a word


def steps(options: Options) -> Iterator[Case]:
    """By number of ranks and batch size, in the first form; of the smallest batch, which launches may bind, also eagerly."""
    for world_size in options.world_sizes:
        for batch_size in options.batch_sizes:
            executions = (
                (options.executions[0], "eager")
                if batch_size == min(options.batch_sizes)
                else options.executions[:1]
            )
            for execution in dict.fromkeys(executions):
                yield measured_apart(PartsSpec, options, world_size, batch_size, execution)


@pytest.mark.specs(cases=steps)
def test_step_breakdown(measure: Measure, spec: TrainingSpec) -> None:
    step = measure(spec)
    spec = dataclasses.replace(
        spec, delay_seconds=0.0
    )  # what --slow-down puts into the step is none of its parts
    parts = measure.reference("parts", measured_as(PartsSpec, spec))
    seconds, marked = measure.reference("step", spec).median_step_seconds(), parts.median_step_seconds()
    found = {sample.set: parts_without_waiting(parts_of(sample, spec.world_size)) for sample in parts.samples}
    for part in PARTS:
        if by_set := {name: each[part] for name, each in found.items() if part in each}:
            measure.metric(f"{part}_seconds", by_set)
    measure.metric(
        "parts_over_step", {sample.set: parts_over_step(parts, sample) for sample in parts.samples}
    )
    measure.metric("marked_over_step", {name: t / seconds[name] for name, t in marked.items()})
    if abs(apart := measure.metrics["parts_over_step"]["value"] - 1) > AGREEMENT:
        measure.note(f"the parts' sum is {apart:+.1%} off the step in which they were timed")
    if bound := step.launch_bound():
        measure.metric("gpu_busy_share", {name: min(1.0, 1 / each) for name, each in bound.items()})
    if peak := peak_flops_per_second(measure.machine.gpu, spec.precision):
        flops = parts.counter("flops")
        measure.metric("mfu", {name: mfu(flops[name], t, peak) for name, t in seconds.items()})
    if spec.world_size > 1:
        if spec.strategy == "ddp":
            alone = measure.reference("no_sync", spec.no_sync())
            spread = {
                sample.set: straggler_spread(alone.rank_step_seconds(sample)) for sample in alone.samples
            }
            measure.metric("straggler_spread", spread)
        costs(measure, step)
    training_metrics(measure, step)


def parts_over_step(parts: Measured, sample: Sample) -> float:
    """Of the rank whose parts are told, its own step: ranks that meet do not begin at the very same time."""
    by_part = parts_of(sample, parts.spec.world_size)
    own = parts.rank_step_seconds(sample)[least_waiting_rank(by_part)]
    return sum(parts_without_waiting(by_part).values()) / own


def parts_of(sample: Sample, ranks: int) -> dict[str, tuple[float, ...]]:
    """By part, its seconds on each of the ranks that the work is spread over."""
    found = {part: sample.counters.get(f"{part}_seconds", ()) for part in PARTS}
    return {part: seconds[:ranks] for part, seconds in found.items() if seconds}


def costs(measure: Measure, step: Measured) -> None:
    """What all devices make of an epoch, against one that trains as many images."""
    spec = step.spec
    assert isinstance(spec, TrainingSpec)
    t1 = measure.reference("one_device", spec.one_device()).slowest_device_seconds(spec.world_size)
    steps = spec.images_per_epoch / spec.per_rank_batch_size  # of one device
    found = {
        name: epoch_cost(steps * t1[name], spec.steps_per_epoch * tN, spec.world_size)
        for name, tN in step.median_step_seconds().items()
    }
    measure.metric("device_seconds_per_epoch", {name: each.device_seconds for name, each in found.items()})
    measure.metric("saved_seconds_per_epoch", {name: each.saved_seconds for name, each in found.items()})
    measure.metric(
        "extra_device_seconds_per_epoch",
        {name: each.extra_device_seconds for name, each in found.items()},
    )
