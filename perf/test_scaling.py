"""Scaling: how much faster do N devices train than one device?

In weak scaling the batch size per rank is constant. In strong scaling the global batch size is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter, itemgetter, mul, truediv
from typing import Any, get_args

import pytest

from ddpperf.analysis.logarithmic_fit import Estimate
from ddpperf.analysis.scaling import (
    PREDICTED_DEVICES,
    Fit,
    Law,
    amdahl_speedup,
    efficiency,
    fit_amdahl,
    fit_gustafson,
    fit_sets,
    gustafson_speedup,
    not_predictable,
    predicted_speedup,
    strong_speedup,
    weak_speedup,
)
from ddpperf.machine.hardware import core_count
from ddpperf.plugin.cases import OWN_DDP, Case, case, if_valid, size_id, skipped, without_torchvision
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.specs import EpochSpec, Model, TrainingSpec, is_custom_model
from ddpperf.specs.strategy_fields import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, DDP_OPTIONS
from perf.common.by_set import by_rank, field_metrics, per_set, sets_by_side
from perf.common.nodes import node_spread
from perf.common.step_metrics import cost_metrics, training_metrics
from perf.common.step_specs import (
    RESNET50_BATCH,
    fewer,
    law_world_sizes,
    resnet50,
    step,
    too_few_world_sizes,
    training,
)

HEAVY = "torchvision:vit_b_16"  # a vision transformer with 86 million parameters


def weak_scaling(options: Options) -> Iterator[Case]:
    """Yield training specs for each world size, batch size per rank and execution mode.

    Compiled steps have the largest batch size only. The largest world size comes first, because a
    larger group of ranks would need a new process set after a smaller group mapped its memory.

    On GPUs the core suite has the first mode on one device and on all devices with every batch
    size, and on other numbers of devices with the largest. It has other strategies and the eager
    step once each, and compiles for one device only. The gate has the first mode on one device and
    on all devices.
    """
    on_cpu, most = options.device == "cpu", max(options.world_sizes)
    for world_size in reversed(options.world_sizes):
        ends = world_size in (1, most)
        for batch_size in options.batch_sizes:
            largest = batch_size == max(options.batch_sizes)
            for execution in options.executions:
                first = execution == options.executions[0]
                if execution in COMPILED_EXECUTIONS and not first and not largest:
                    continue
                if first:
                    core = ends or largest
                elif execution == "eager":  # DDP and DataParallel, which are compared
                    core = world_size == most > 1 and largest
                else:
                    core = world_size == 1
                fields = training(options, world_size, batch_size, execution)
                yield case(options.step(**fields), core=on_cpu or core, gate=ends and first)
                core = world_size == most and largest and first
                for own_fields in own_ddp(options, fields):
                    yield case(options.step(**own_fields), core=on_cpu or core)
            core = world_size == most and largest and options.executions[0] != "eager"
            yield from one_process(options, world_size, batch_size, core=on_cpu or core)
    if not on_cpu and options.model in get_args(Model):
        for world_size in options.world_sizes:
            yield case(heavy(options, world_size), core=world_size in (1, most))
    for step_of_resnet50 in resnet50(options, partial(deeper, options)):
        yield case(step_of_resnet50, core=False)


def strong_scaling(options: Options) -> Iterator[Case]:
    """Yield training specs for each world size and each global batch size.

    A global batch size that does not divide over the ranks is skipped. On GPUs the core suite
    leaves out DataParallel, and has all numbers of devices for the largest global batch size. The
    gate has all GPUs. On a CPU the gate leaves strong scaling out, because weak scaling measures
    the same step there.
    """
    on_cpu, most = options.device == "cpu", max(options.world_sizes)
    for global_batch_size in options.global_batch_sizes:
        for world_size in reversed(options.world_sizes):
            identity = f"{size_id(options, world_size)}-global_b{global_batch_size}"
            if global_batch_size % world_size == 0:
                batch_size = global_batch_size // world_size
                found = if_valid(identity, step, options, world_size, batch_size, options.executions[0])
                core = world_size in (1, most) or global_batch_size == max(options.global_batch_sizes)
                yield case(found, core=on_cpu or core, gate=not on_cpu and world_size == most)
                yield from one_process(options, world_size, batch_size, core=on_cpu)
            else:
                reason = f"a global batch of {global_batch_size} does not divide over {world_size} ranks"
                yield skipped(identity, reason)


def weak_laws(options: Options) -> Iterator[Case]:
    """Yield training specs to which Gustafson's law is fitted, one for each batch size per rank.

    The core suite has the largest batch size, unless the law needs more ranks than other tests.
    """
    world_sizes = law_world_sizes(options)
    most = max(world_sizes)
    if reason := too_few_world_sizes(options, world_sizes):
        yield skipped(size_id(options, most), reason)
        return
    for batch_size in options.batch_sizes:
        identity = size_id(options, most, batch_size)
        found = if_valid(identity, step, options, most, batch_size, options.executions[0])
        core = most <= max(options.world_sizes) and batch_size == max(options.batch_sizes)
        yield case(found, core=core)


def strong_laws(options: Options) -> Iterator[Case]:
    """Yield training specs to which Amdahl's law is fitted, one for each global batch size.

    A global batch size is skipped unless it divides over two world sizes above 1. The core suite
    has the largest, unless the law needs more ranks than other tests.
    """
    world_sizes = law_world_sizes(options)
    if reason := too_few_world_sizes(options, world_sizes):
        yield skipped(size_id(options, max(world_sizes)), reason)
        return
    for images in options.global_batch_sizes:
        sizes = [N for N in world_sizes if N > 1 and images % N == 0]
        most = max(sizes, default=1)
        identity = f"{size_id(options, most)}-global_b{images}"
        if len(sizes) > 1:
            found = if_valid(identity, step, options, most, images // most, options.executions[0])
            core = most <= max(options.world_sizes) and images == max(options.global_batch_sizes)
            yield case(found, core=core)
        else:
            listed = f"{', '.join(map(str, world_sizes))}; pass other --global-batch-sizes"
            reason = f"a global batch of {images} does not divide over two of the world sizes {listed}"
            yield skipped(identity, reason)


def epochs(options: Options) -> Iterator[Case]:
    """Yield the epochs to measure for each world size, in descending order of world size.

    They have the largest batch size per rank, and the first and the fastest execution mode of
    --executions. The core suite has DDP on all devices in the first mode, because compiling a DDP
    step and the step of one device took 24 s on two H200s, or the fastest mode on an only device.
    """
    most = max(options.world_sizes)
    mode = options.executions[0] if most > 1 else options.fastest_execution
    if not is_custom_model(options.model):
        for world_size in reversed(options.world_sizes):
            for execution in dict.fromkeys((options.executions[0], options.fastest_execution)):
                fields = training(options, world_size, max(options.batch_sizes), execution)
                fields["input"] = "device"
                yield case(options.epoch(**fields), core=world_size == most and execution == mode)
                for own_fields in own_ddp(options, fields):
                    yield case(options.epoch(**own_fields), core=False)


def own_ddp(options: Options, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of a training spec with DDP replaced by own_ddp, this project's minimal DDP.

    Nothing is yielded on one device, if the step is not captured in a CUDA graph, or if --spec is
    given.
    """
    if fields["world_size"] > 1 and fields["execution"] in CAPTURED_EXECUTIONS and not options.spec_fields:
        yield fields | DDP_OPTIONS | OWN_DDP


def one_process(options: Options, world_size: int, batch_size: int, *, core: bool) -> Iterator[Case]:
    """Yield a training spec with torch's DataParallel, in which one process drives all devices."""
    if world_size > 1:
        fields = training(options, world_size, batch_size, "eager")
        identity = f"{size_id(options, world_size, batch_size)}-data_parallel"
        yield case(if_valid(identity, options.step, **fields | {"strategy": "data_parallel"}), core=core)


def heavy(options: Options, world_size: int) -> Case:
    """Return the training spec of a vision transformer, or a skipped test if it cannot be trained.

    The model computes little for its 86 million parameters, so communication takes long.
    """
    fields = training(options, world_size, 128, options.executions[0])
    identity = f"{size_id(options, world_size)}-{HEAVY}"
    found = if_valid(identity, options.step, **fields | {"model": HEAVY})
    if not isinstance(found, TrainingSpec):
        return found
    if options.data.image_size != (32, 32):
        return skipped(found, f"model {HEAVY} takes images of 32x32, the data set has images of another size")
    return without_torchvision(found, f"model {HEAVY}")


def deeper(options: Options, model: Model, world_size: int) -> Case:
    """Return the case of a ResNet-50 training step on some devices."""
    identity = f"{size_id(options, world_size)}-{model}"
    execution = options.executions[0]
    return if_valid(identity, step, options, world_size, RESNET50_BATCH, execution, model=model)


@pytest.mark.specs(cases=weak_scaling)
def test_weak_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster do N devices train than one device if the batch size per rank is constant?"""
    scaling_metrics(measure, spec, spec.one_device(), weak_speedup)


@pytest.mark.specs(cases=strong_scaling)
def test_strong_scaling(measure: Measure, spec: TrainingSpec) -> None:
    """How much faster do N devices train than one device if the global batch size is constant?"""
    one_device = dataclasses.replace(spec.one_device(), per_rank_batch_size=spec.global_batch_size)
    scaling_metrics(measure, spec, one_device, strong_speedup)


@pytest.mark.specs(cases=epochs)
def test_epoch_scaling(measure: Measure, spec: EpochSpec) -> None:
    """How much faster is an epoch on N devices than on one device, per trained image?

    N ranks drop more images at the end of an epoch than one rank.
    """
    one_device = spec.one_device()
    images = spec.images_per_epoch / one_device.images_per_epoch
    epoch = scaling_metrics(
        measure, spec, one_device, lambda t1, tN, world_size: strong_speedup(t1 * images, tN, world_size)
    )
    TN = epoch.median_step_seconds()
    speedups = measure.metrics["speedup"]["by_set"] if spec.world_size > 1 else dict.fromkeys(TN, 1.0)
    cost_metrics(measure, per_set(mul, TN, speedups), TN, spec.world_size)


def scaling_metrics(
    measure: Measure,
    spec: TrainingSpec,
    one_device: TrainingSpec,
    speedup_of: Callable[[float, float, int], float],
) -> Measured:
    """Measure a training step on N devices and on one device, and store speedup and efficiency.

    speedup_of: the function of t(1), t(N) and N that returns the speedup. Returns the measurement
    on N devices.
    """
    step = measure(spec)
    if spec.world_size > 1:
        tN = step.median_step_seconds()
        alone = measure.reference("one_device", one_device)
        t1 = alone.slowest_device_seconds(spec.world_size)
        speedup = per_set(lambda t1, tN: speedup_of(t1, tN, spec.world_size), t1, tN)
        measure.metric("speedup", speedup)
        measure.metric("efficiency", per_set(lambda speedup: efficiency(speedup, spec.world_size), speedup))
        node_spread(measure, by_rank(alone, spec.world_size), spec.world_size)
    if spec.strategy == "data_parallel":
        ddp = measure.reference("ddp", spec.ddp()).median_step_seconds()
        measure.metric("ddp_over_data_parallel", per_set(truediv, step.median_step_seconds(), ddp))
    training_metrics(measure, step)
    return step


@pytest.mark.specs(cases=weak_laws)
def test_gustafson(measure: Measure, spec: TrainingSpec) -> None:
    """Which fraction of a step is serial by Gustafson's law, at a constant batch size per rank?"""
    cases = {N: dataclasses.replace(spec, world_size=N) for N in fewer(measure, spec)}
    law_metrics(measure, spec, cases, spec.one_device(), weak_speedup, fit_gustafson, gustafson_speedup)


@pytest.mark.specs(cases=strong_laws)
def test_amdahl(measure: Measure, spec: TrainingSpec) -> None:
    """Which fraction of a step is serial by Amdahl's law, with a constant global batch size?"""
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
    fit: Fit,
    law: Law,
) -> None:
    """Fit Amdahl's or Gustafson's law to measured speedups, and store the serial fraction.

    The interval of the fraction, the measured speedups, and the predictions for up to 32 devices
    are stored, too. Base and candidate of an A/B run have their own fits.
    cases: the training spec of each smaller world size.
    """
    step = measure(spec)
    seconds = {spec.world_size: step.median_step_seconds()}
    for N, smaller in cases.items():
        seconds[N] = measure.reference(f"world_size={N}", smaller).median_step_seconds()
    t1 = measure.reference("one_device", one_device).slowest_device_seconds(spec.world_size)
    sizes = sorted(seconds)
    speedups = {name: [speedup_of(t, seconds[N][name], N) for N in sizes] for name, t in t1.items()}
    fractions = per_set(lambda of_set: fit(sizes, of_set).value, speedups)
    measure.metric("serial_fraction", fractions)
    sides = sets_by_side(step)
    fits = {side: fit_sets(fit, sizes, [speedups[name] for name in names]) for side, names in sides.items()}
    together = {name: fits[side] for side, names in sides.items() for name in names}
    if all(math.isfinite(estimate.high) for estimate in fits.values()):
        field_metrics(measure, together, serial_fraction_low="low", serial_fraction_high="high")
    for place, N in enumerate(sizes):
        measure.metric(f"speedup_of_{N}", per_set(itemgetter(place), speedups))
    cores, ranks = core_count(), measure.machine.ranks_here(spec.world_size)
    if measure.machine.device == "cpu" and ranks > cores:
        shared = f"{ranks} ranks share {cores} cores"
        measure.warn(f"{shared}, so the law describes these cores and predicts nothing about more of them")
    impossible = {side: reason for side, one in fits.items() if (reason := not_predictable(one.value))}
    for side, reason in impossible.items():
        measure.note(f"{f'{side}: ' if side else ''}{reason}, so nothing is predicted")
    if impossible:
        return
    for N in sorted({*sizes, *PREDICTED_DEVICES}):
        predictions(measure, law, N, fractions, together)


def predictions(
    measure: Measure, law: Law, N: int, fractions: Mapping[str, float], together: Mapping[str, Estimate]
) -> None:
    """Store the speedup and the efficiency that a law predicts for N devices.

    fractions: the serial fraction of each process set. together: for each process set, the estimate
    from all process sets of its side, which has the interval. No interval is stored if the measured
    speedups give none.
    """
    predicted = per_set(lambda estimate: predicted_speedup(law, estimate, N), together)
    values = {"": per_set(lambda fraction: law(min(max(fraction, 0.0), 1.0), N), fractions)}
    if all(math.isfinite(speedup.high) for speedup in predicted.values()):
        values |= {f"_{end}": per_set(attrgetter(end), predicted) for end in ("low", "high")}
    for end, speedup in values.items():
        measure.metric(f"predicted_speedup_of_{N}{end}", speedup)
        found = per_set(lambda speedup: efficiency(speedup, N), speedup)
        measure.metric(f"predicted_efficiency_of_{N}{end}", found)
