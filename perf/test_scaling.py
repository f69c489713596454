"""Scaling: how much more do N devices train than one, with the batch a device or the global batch constant?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from ddpperf.analysis.scaling import efficiency, strong_speedup, weak_speedup
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options
from ddpperf.specs import Strategy, TrainingSpec


def weak_scaling(options: Options) -> Iterator[TrainingSpec]:
    for world_size in options.world_sizes:
        for batch_size in options.batch_sizes:
            yield cell(world_size, batch_size)


def strong_scaling(options: Options) -> Iterator[TrainingSpec]:
    for global_batch_size in (128, 512) if options.device == "cuda" else (64,):
        for world_size in options.world_sizes:
            if global_batch_size % world_size == 0:
                yield cell(world_size, global_batch_size // world_size)


def cell(world_size: int, per_rank_batch_size: int) -> TrainingSpec:
    strategy: Strategy = "single" if world_size == 1 else "ddp"
    return TrainingSpec(world_size=world_size, per_rank_batch_size=per_rank_batch_size, strategy=strategy)


@pytest.mark.specs(cells=weak_scaling)
def test_weak_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """The batch a rank stays the same: N devices do N times the work in a step."""
    one_device = spec.one_device()
    scaling_metrics(measure, spec, one_device, weak_speedup)


@pytest.mark.specs(cells=strong_scaling)
def test_strong_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """The global batch stays the same: N devices share the work of one step."""
    one_device = dataclasses.replace(spec.one_device(), per_rank_batch_size=spec.world_size * spec.per_rank_batch_size)
    scaling_metrics(measure, spec, one_device, strong_speedup)


def scaling_metrics(
    measure: Measure, spec: TrainingSpec, one_device: TrainingSpec, speedup_of: Callable[[float, float, int], float]
) -> None:
    tN = measure(spec).median_step_seconds()
    if spec.world_size > 1:
        t1 = measure.leg("one_device", one_device).slowest_device_seconds(spec.world_size)
        speedup = {name: speedup_of(t1[name], tN[name], spec.world_size) for name in tN}
        measure.metric("speedup", "1", speedup)
        measure.metric("efficiency", "1", {name: efficiency(speedup[name], spec.world_size) for name in tN})
    global_batch_size = spec.world_size * spec.per_rank_batch_size
    measure.metric("images_per_second", "1/s", {name: global_batch_size / tN[name] for name in tN})
