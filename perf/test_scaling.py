"""Scaling: how much more do N devices train than one, with the batch a device or the global batch constant?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import pytest

from ddpperf.analysis.scaling import efficiency, strong_speedup, weak_speedup
from ddpperf.analysis.scaling_laws import (
    SerialShare,
    amdahl_speedup,
    fit_amdahl,
    fit_gustafson,
    gustafson_speedup,
    over_sets,
)
from ddpperf.plugin.cases import OWN_DDP, Case, if_valid, size_id, skipped, without_torchvision
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.specs import EpochSpec, Model, TrainingSpec, is_custom_model
from ddpperf.specs.strategy import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, DDP_OPTIONS
from perf.common import gate
from perf.common.metrics import training_metrics
from perf.common.trainings import fewer, step, training

HEAVY = "torchvision:vit_b_16"  # 86 million parameters, 5 tokens an image of 32x32: much to communicate, little to compute


def weak_scaling(options: Options) -> Iterator[Case]:
    """In every form; what must be compiled for each batch size and world size, for the largest batch only.

    The most ranks first: after a smaller group had its memory mapped, a larger one needs fresh sets.
    """
    for world_size in reversed(options.world_sizes):
        for batch_size in options.batch_sizes:
            for execution in options.executions:
                compiled = execution in COMPILED_EXECUTIONS and execution != options.executions[0]
                if not compiled or batch_size == max(options.batch_sizes):
                    fields = training(options, world_size, batch_size, execution)
                    yield options.step(**fields)
                    for beside in own_ddp(options, fields):
                        yield options.step(**beside)
            yield from one_process(options, world_size, batch_size)
    if options.device == "cuda" and options.model in get_args(Model):
        for world_size in options.world_sizes:
            yield heavy(options, world_size)


def strong_scaling(options: Options) -> Iterator[Case]:
    """The most ranks first, as above."""
    for global_batch_size in options.global_batch_sizes:
        for world_size in reversed(options.world_sizes):
            identity = f"{size_id(options.device, world_size)}-global_b{global_batch_size}"
            if global_batch_size % world_size == 0:
                batch_size = global_batch_size // world_size
                yield if_valid(
                    identity, partial(step, options, world_size, batch_size, options.executions[0])
                )
                yield from one_process(options, world_size, batch_size)
            else:
                reason = f"a global batch of {global_batch_size} does not divide over {world_size} ranks"
                yield skipped(identity, reason)


def weak_laws(options: Options) -> Iterator[Case]:
    """On all devices, in the first form; with two numbers of devices beyond one, or more, else there is nothing to fit."""
    most = max(options.world_sizes)
    if sum(world_size > 1 for world_size in options.world_sizes) > 1:
        for batch_size in options.batch_sizes:
            identity = size_id(options.device, most, batch_size)
            yield if_valid(identity, partial(step, options, most, batch_size, options.executions[0]))


def strong_laws(options: Options) -> Iterator[Case]:
    for images in options.global_batch_sizes:
        sizes = [
            world_size for world_size in options.world_sizes if world_size > 1 and images % world_size == 0
        ]
        if len(sizes) > 1:
            identity = f"{size_id(options.device, max(sizes))}-global_b{images}"
            yield if_valid(
                identity, partial(step, options, max(sizes), images // max(sizes), options.executions[0])
            )


def epochs(options: Options) -> Iterator[Case]:
    """Of the largest batch, in the fastest form; the most ranks first, as above."""
    if not is_custom_model(options.model):
        for world_size in reversed(options.world_sizes):
            fields = training(options, world_size, max(options.batch_sizes), options.fastest_form) | {
                "input": "device"
            }
            yield options.epoch(**fields)
            for beside in own_ddp(options, fields):
                yield options.epoch(**beside)


def own_ddp(options: Options, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields of the same captured training by our DDP, unless --spec says by what, or with which options."""
    if fields["world_size"] > 1 and fields["execution"] in CAPTURED_EXECUTIONS and not options.spec_fields:
        yield fields | DDP_OPTIONS | OWN_DDP


def one_process(options: Options, world_size: int, batch_size: int) -> Iterator[Case]:
    if world_size > 1:
        fields = training(options, world_size, batch_size, "eager")
        identity = f"{size_id(options.device, world_size, batch_size)}-data_parallel"
        yield if_valid(identity, partial(options.step, **fields | {"strategy": "data_parallel"}))


def heavy(options: Options, world_size: int) -> Case:
    fields = training(options, world_size, 128, options.executions[0])
    case = if_valid(
        f"{size_id(options.device, world_size)}-{HEAVY}", partial(options.step, **fields | {"model": HEAVY})
    )
    if not isinstance(case, TrainingSpec):
        return case
    if options.data.image_size != (32, 32):
        return skipped(
            case, f"model {HEAVY} is built for images of 32x32, the data set's are larger or smaller"
        )
    return without_torchvision(case, f"model {HEAVY}")


@pytest.mark.specs(cases=weak_scaling, gate=gate.scaling)
def test_weak_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """The batch a rank stays the same: N devices do N times the work in a step."""
    scaling_metrics(measure, spec, spec.one_device(), weak_speedup)


@pytest.mark.specs(cases=strong_scaling, gate=gate.strong_scaling)
def test_strong_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """The global batch stays the same: N devices share the work of one step."""
    one_device = dataclasses.replace(spec.one_device(), per_rank_batch_size=spec.global_batch_size)
    scaling_metrics(measure, spec, one_device, strong_speedup)


@pytest.mark.specs(cases=epochs)
def test_epoch_scaling(measure: Measure, spec: EpochSpec) -> None:
    """The same images, shared by N devices: T(1) / T(N) by image, since a little more is dropped at the end of N shards."""
    one_device = spec.one_device()
    images = spec.images_per_epoch / one_device.images_per_epoch
    scaling_metrics(
        measure, spec, one_device, lambda t1, tN, world_size: strong_speedup(t1 * images, tN, world_size)
    )


def scaling_metrics(
    measure: Measure,
    spec: TrainingSpec,
    one_device: TrainingSpec,
    speedup_of: Callable[[float, float, int], float],
) -> None:
    step = measure(spec)
    if spec.world_size > 1:
        tN = step.median_step_seconds()
        t1 = measure.reference("one_device", one_device).slowest_device_seconds(spec.world_size)
        speedup = {name: speedup_of(t1[name], tN[name], spec.world_size) for name in tN}
        measure.metric("speedup", speedup)
        measure.metric("efficiency", {name: efficiency(speedup[name], spec.world_size) for name in tN})
    training_metrics(measure, step)


@pytest.mark.specs(cases=weak_laws)
def test_gustafson(measure: Measure, spec: TrainingSpec) -> None:
    """Which share of a step do N devices not share, if the batch a device stays the same?"""
    cases = {N: dataclasses.replace(spec, world_size=N) for N in fewer(measure, spec)}
    law_metrics(measure, spec, cases, spec.one_device(), weak_speedup, fit_gustafson, gustafson_speedup)


@pytest.mark.specs(cases=strong_laws)
def test_amdahl(measure: Measure, spec: TrainingSpec) -> None:
    """Which share of a step do N devices not share, if the global batch stays the same?"""
    images = spec.global_batch_size
    sizes = [N for N in fewer(measure, spec) if images % N == 0]
    cases = {N: dataclasses.replace(spec, world_size=N, per_rank_batch_size=images // N) for N in sizes}
    one_device = dataclasses.replace(spec.one_device(), per_rank_batch_size=images)
    law_metrics(measure, spec, cases, one_device, strong_speedup, fit_amdahl, amdahl_speedup)


def law_metrics(
    measure: Measure,
    spec: TrainingSpec,
    cases: Mapping[int, TrainingSpec],
    one_device: TrainingSpec,
    speedup_of: Callable[[float, float, int], float],
    fit: Callable[[Sequence[int], Sequence[float]], SerialShare],
    law: Callable[[float, int], float],
) -> None:
    """The serial share, with its interval, over the spec's number of devices and those of `cells`, which have the most first.

    Beside each speedup stands what the law makes of that share.
    """
    seconds = {spec.world_size: measure(spec).median_step_seconds()}
    seconds |= {
        N: measure.reference(f"world_size={N}", case).median_step_seconds() for N, case in cases.items()
    }
    t1 = measure.reference("one_device", one_device).slowest_device_seconds(spec.world_size)
    sizes, sets = sorted(seconds), list(t1)
    speedups = {name: [speedup_of(t1[name], seconds[N][name], N) for N in sizes] for name in sets}
    shares = {name: fit(sizes, speedups[name]).share for name in sets}
    measure.metric("serial_share", shares)
    together = over_sets(list(shares.values())) if len(sets) > 1 else fit(sizes, speedups[sets[0]])
    if math.isfinite(together.high):
        measure.metric("serial_share_low", dict.fromkeys(sets, together.low))
        measure.metric("serial_share_high", dict.fromkeys(sets, together.high))
    for place, N in enumerate(sizes):
        measure.metric(f"speedup_of_{N}", {name: speedups[name][place] for name in sets})
        measure.metric(f"predicted_speedup_of_{N}", {name: law(shares[name], N) for name in sets})
