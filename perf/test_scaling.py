"""Scaling: how much more do N devices train than one, with the batch a device or the global batch constant?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import get_args

import pytest

from ddpperf.analysis.scaling import efficiency, strong_speedup, weak_speedup
from ddpperf.plugin.cells import Cell, skipped, without_torchvision
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options
from ddpperf.specs import Model, TrainingSpec
from perf.metrics import training_metrics

HEAVY = "torchvision:vit_b_16"  # 86 million parameters, 5 tokens an image of 32x32: much to communicate, little to compute


def weak_scaling(options: Options) -> Iterator[Cell]:
    for world_size in options.world_sizes:
        for batch_size in options.batch_sizes:
            yield from strategies(options, world_size, batch_size)
    if options.device == "cuda" and options.model in get_args(Model):
        for world_size in options.world_sizes:
            yield heavy(options, world_size)


def strong_scaling(options: Options) -> Iterator[Cell]:
    for global_batch_size in options.global_batch_sizes:
        for world_size in options.world_sizes:
            if global_batch_size % world_size == 0:
                yield from strategies(options, world_size, global_batch_size // world_size)
            else:
                reason = f"a global batch of {global_batch_size} does not divide over {world_size} ranks"
                yield skipped(f"world_size={world_size}-global_batch={global_batch_size}", reason)


def strategies(options: Options, world_size: int, batch_size: int) -> Iterator[Cell]:
    yield options.step(world_size=world_size, per_rank_batch_size=batch_size)
    if world_size > 1:
        one_process = options.step(world_size=world_size, per_rank_batch_size=batch_size, strategy="data_parallel")
        reason = "strategy data_parallel drives several GPUs from one process; this runs on the CPU"
        yield one_process if options.device == "cuda" else skipped(one_process.id, reason)


def heavy(options: Options, world_size: int) -> Cell:
    spec = options.step(world_size=world_size, per_rank_batch_size=128, model=HEAVY)
    if options.data.image_size != (32, 32):
        return skipped(spec.id, f"model {HEAVY} is built for images of 32x32, the data set's are larger or smaller")
    return without_torchvision(spec, f"model {HEAVY}")


@pytest.mark.specs(cells=weak_scaling)
def test_weak_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """The batch a rank stays the same: N devices do N times the work in a step."""
    scaling_metrics(measure, spec, spec.one_device(), weak_speedup)


@pytest.mark.specs(cells=strong_scaling)
def test_strong_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """The global batch stays the same: N devices share the work of one step."""
    one_device = dataclasses.replace(spec.one_device(), per_rank_batch_size=spec.global_batch_size)
    scaling_metrics(measure, spec, one_device, strong_speedup)


def scaling_metrics(
    measure: Measure, spec: TrainingSpec, one_device: TrainingSpec, speedup_of: Callable[[float, float, int], float]
) -> None:
    step = measure(spec)
    if spec.world_size > 1:
        tN = step.median_step_seconds()
        t1 = measure.leg("one_device", one_device).slowest_device_seconds(spec.world_size)
        speedup = {name: speedup_of(t1[name], tN[name], spec.world_size) for name in tN}
        measure.metric("speedup", "1", speedup)
        measure.metric("efficiency", "1", {name: efficiency(speedup[name], spec.world_size) for name in tN})
    training_metrics(measure, step)
