"""Scaling: how much more do N devices train than one, with the batch a device or the global batch constant?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import pytest

from ddpperf.analysis.scaling import efficiency, strong_speedup, weak_speedup
from ddpperf.plugin.cells import Cell, if_valid, skipped, without_torchvision
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options
from ddpperf.specs import EpochSpec, Form, Model, TrainingSpec, is_own_model
from ddpperf.specs.strategy import CAPTURED_FORMS, COMPILED_FORMS
from perf import gate
from perf.metrics import training_metrics

HEAVY = "torchvision:vit_b_16"  # 86 million parameters, 5 tokens an image of 32x32: much to communicate, little to compute


# Of what can be captured the fastest: NCCL's own average, gradients that lie in their buckets, BatchNorm's statistics left to
# each rank.
FASTEST_DDP = {"comm_hook": "avg", "gradient_as_bucket_view": True, "buffer_sync": False}


def weak_scaling(options: Options) -> Iterator[Cell]:
    """In every form; what must be compiled for each batch size and world size, for the largest batch only."""
    for world_size in options.world_sizes:
        for batch_size in options.batch_sizes:
            for form in options.forms:
                compiled = form in COMPILED_FORMS and form != options.forms[0]
                if not compiled or batch_size == max(options.batch_sizes):
                    yield step(options, world_size, batch_size, form)
            yield from one_process(options, world_size, batch_size)
    if options.device == "cuda" and options.model in get_args(Model):
        for world_size in options.world_sizes:
            yield heavy(options, world_size)


def strong_scaling(options: Options) -> Iterator[Cell]:
    for global_batch_size in options.global_batch_sizes:
        for world_size in options.world_sizes:
            identity = f"world_size={world_size}-global_batch={global_batch_size}"
            if global_batch_size % world_size == 0:
                batch_size = global_batch_size // world_size
                yield if_valid(identity, partial(step, options, world_size, batch_size, options.forms[0]))
                yield from one_process(options, world_size, batch_size)
            else:
                reason = f"a global batch of {global_batch_size} does not divide over {world_size} ranks"
                yield skipped(identity, reason)


def epochs(options: Options) -> Iterator[Cell]:
    """Of the largest batch, in the fastest form."""
    if not is_own_model(options.model):
        for world_size in options.world_sizes:
            fields = training(options, world_size, max(options.batch_sizes), options.fastest_form)
            yield options.epoch(**fields | {"input": "device"})


def step(options: Options, world_size: int, batch_size: int, form: Form) -> TrainingSpec:
    return options.step(**training(options, world_size, batch_size, form))


def training(options: Options, world_size: int, batch_size: int, form: Form) -> dict[str, Any]:
    """A training's fields: alone or by DDP, which is as fast as it can be where it is captured, else as it is by default."""
    fields = {"world_size": world_size, "per_rank_batch_size": batch_size, "form": form, "input": options.input}
    return fields | (FASTEST_DDP if world_size > 1 and form in CAPTURED_FORMS else {})


def one_process(options: Options, world_size: int, batch_size: int) -> Iterator[Cell]:
    if world_size > 1:
        fields = training(options, world_size, batch_size, "eager")
        identity = f"world_size={world_size}-batch={batch_size}-data_parallel"
        yield if_valid(identity, partial(options.step, **fields | {"strategy": "data_parallel"}))


def heavy(options: Options, world_size: int) -> Cell:
    fields = training(options, world_size, 128, options.forms[0])
    cell = if_valid(f"world_size={world_size}-{HEAVY}", partial(options.step, **fields | {"model": HEAVY}))
    if not isinstance(cell, TrainingSpec):
        return cell
    if options.data.image_size != (32, 32):
        return skipped(cell.id, f"model {HEAVY} is built for images of 32x32, the data set's are larger or smaller")
    return without_torchvision(cell, f"model {HEAVY}")


@pytest.mark.specs(cells=weak_scaling, gate=gate.scaling)
def test_weak_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """The batch a rank stays the same: N devices do N times the work in a step."""
    scaling_metrics(measure, spec, spec.one_device(), weak_speedup)


@pytest.mark.specs(cells=strong_scaling, gate=gate.strong_scaling)
def test_strong_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """The global batch stays the same: N devices share the work of one step."""
    one_device = dataclasses.replace(spec.one_device(), per_rank_batch_size=spec.global_batch_size)
    scaling_metrics(measure, spec, one_device, strong_speedup)


@pytest.mark.specs(cells=epochs)
def test_epoch_scaling(measure: Measure, spec: EpochSpec) -> None:
    """The same images, shared by N devices: T(1) / T(N) by image, since a little more is dropped at the end of N shards."""
    one_device = spec.one_device()
    images = spec.images_per_epoch / one_device.images_per_epoch
    scaling_metrics(measure, spec, one_device, lambda t1, tN, world_size: strong_speedup(t1 * images, tN, world_size))


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
