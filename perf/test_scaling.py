"""Scaling: how much faster do N devices train than one device?

In weak scaling the batch size per rank is constant. In strong scaling the global batch size is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from operator import attrgetter, itemgetter, mul, truediv
from typing import Any, get_args

import pytest

from ddpperf.analysis.scaling import (
    PREDICTED_DEVICES,
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
from ddpperf.analysis.statistics import Estimate
from ddpperf.machine.hardware import core_count
from ddpperf.plugin.cases import OWN_DDP, Case, case, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.specs import EpochSpec, Execution, Model, TrainingSpec, is_custom_model, measured_as
from ddpperf.specs.training_step import CAPTURED_EXECUTIONS, COMPILED_EXECUTIONS, DDP_OPTIONS
from perf.common.by_set import per_set, sets_by_side
from perf.common.step_metrics import cost_metrics, training_metrics
from perf.common.step_specs import (
    fewer,
    global_batch_case,
    law_world_sizes,
    one_process,
    resnet50,
    step_case,
    too_few_world_sizes,
)

HEAVY = "torchvision:vit_b_16"  # a vision transformer with 86 million parameters
HEAVY_BATCH = 128  # images per rank


def weak_scaling(options: Options) -> Iterator[Case]:
    """Yield training specs for each world size, batch size per rank and execution mode.

    Compiled steps have the largest batch size only. The largest world size comes first, because a
    larger group of ranks would need a new process set after a smaller group mapped its memory.

    On GPUs, the core suite has the first execution mode with every batch size on one device and on
    all devices, and with the largest batch size on other numbers of devices. It has one eager step,
    one step of each other strategy, and compiled steps on one device only. The gate has the first
    execution mode on one device and on all devices.
    """
    on_cpu, first = options.device == "cpu", options.executions[0]
    most, largest = max(options.world_sizes), max(options.batch_sizes)
    for N, batch_size in product(reversed(options.world_sizes), options.batch_sizes):
        ends, extreme = N in (1, most), most == N and batch_size == largest
        for execution in options.executions:
            if execution == first:
                core = ends or batch_size == largest
            elif execution == "eager":  # DDP and DataParallel, which are compared
                core = extreme and N > 1
            else:
                core = N == 1
            if execution == first or execution not in COMPILED_EXECUTIONS or batch_size == largest:
                step = step_case(options, N, batch_size, execution)
                yield case(step, core=on_cpu or core, gate=ends and execution == first)
                core = extreme and execution == first
                yield from own_ddp(options, N, batch_size, execution, core=on_cpu or core)
        yield from one_process(options, N, batch_size, core=on_cpu or (extreme and first != "eager"))
    if not on_cpu and options.model in get_args(Model):
        for N in options.world_sizes:
            yield case(heavy(options, N), core=N in (1, most))
    yield from resnet50(options)


def strong_scaling(options: Options) -> Iterator[Case]:
    """Yield training specs for each world size and each global batch size.

    A global batch size that does not divide over the ranks is skipped. On GPUs the core suite
    leaves out DataParallel, and has all numbers of devices for the largest global batch size. The
    gate has all GPUs. On a CPU the gate leaves strong scaling out, because weak scaling measures
    the same step there.
    """
    on_cpu, most = options.device == "cpu", max(options.world_sizes)
    for images, N in product(options.global_batch_sizes, reversed(options.world_sizes)):
        core = N in (1, most) or images == max(options.global_batch_sizes)
        gate = not on_cpu and most == N
        yield case(global_batch_case(options, N, images), core=on_cpu or core, gate=gate)
        if images % N == 0:
            yield from one_process(options, N, images // N, core=on_cpu)


def laws(options: Options, *, weak: bool) -> Iterator[Case]:
    """Yield training specs to which a law is fitted, one for each batch size.

    Gustafson's law (weak) has each batch size per rank, and Amdahl's law each global batch size. A
    global batch size is skipped unless two or more world sizes above 1 divide it. The core suite has
    the largest batch size, unless the law needs more ranks than other tests.
    """
    world_sizes = law_world_sizes(options)
    if reason := too_few_world_sizes(options, world_sizes):
        yield skipped(size_id(options, max(world_sizes)), reason)
        return
    step_of = step_case if weak else global_batch_case
    batch_sizes = options.batch_sizes if weak else options.global_batch_sizes
    for images in batch_sizes:
        sizes = [N for N in world_sizes if N > 1 and (weak or images % N == 0)]
        most = max(sizes, default=1)
        if len(sizes) > 1:
            core = most <= max(options.world_sizes) and images == max(batch_sizes)
            yield case(step_of(options, most, images), core=core)
        else:
            listed = f"{', '.join(map(str, world_sizes))}; pass other --global-batch-sizes"
            reason = f"a global batch of {images} does not divide over two of the world sizes {listed}"
            yield skipped(f"{size_id(options, most)}-global_b{images}", reason)


def epochs(options: Options) -> Iterator[Case]:
    """Yield the epochs to measure for each world size, in descending order of world size.

    They have the largest batch size per rank, and the first and the fastest execution mode of
    --executions. On several devices, the core suite has DDP on all devices in the first mode only,
    because compiling a DDP step and the step of one device took 24 s on two H200s. With a single
    device, the core suite has the fastest mode.
    """
    if is_custom_model(options.model):
        return
    most, batch_size = max(options.world_sizes), max(options.batch_sizes)
    first, fastest = options.executions[0], options.fastest_execution
    images: dict[str, Any] = {"epoch": True, "input": "device"}
    for N, execution in product(reversed(options.world_sizes), dict.fromkeys((first, fastest))):
        core = most == N and execution == (first if most > 1 else fastest)
        yield case(step_case(options, N, batch_size, execution, **images), core=core)
        yield from own_ddp(options, N, batch_size, execution, core=False, **images)


def own_ddp(
    options: Options, N: int, batch_size: int, execution: Execution, *, core: bool, **images: Any
) -> Iterator[Case]:
    """Yield a step with own_ddp, this project's minimal DDP, if it is captured in a CUDA graph.

    Nothing is yielded on one device, or if --spec is given. images: further arguments of
    `step_case`, which say where the images of an epoch are.
    """
    if N > 1 and execution in CAPTURED_EXECUTIONS and not options.spec_fields:
        fields = DDP_OPTIONS | OWN_DDP | images
        yield case(step_case(options, N, batch_size, execution, **fields), core=core)


def heavy(options: Options, N: int) -> Case:
    """Return the training spec of a vision transformer, or a skipped test if it cannot be trained.

    The model computes little for its 86 million parameters, so communication takes long.
    """
    found = step_case(options, N, HEAVY_BATCH, name=HEAVY, model=HEAVY)
    if isinstance(found, TrainingSpec) and options.data.image_size != (32, 32):
        return skipped(found, f"model {HEAVY} takes images of 32x32, the data set has images of another size")
    return found


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
    step, N = measure(spec), spec.world_size
    training_metrics(measure, step)  # before the references, which a repeated measurement leaves out
    if N > 1:
        t1 = slowest_alone(measure, one_device, N)
        speedup = per_set(lambda t1, tN: speedup_of(t1, tN, N), t1, step.median_step_seconds())
        measure.metric("speedup", speedup)
        measure.metric("efficiency", per_set(lambda speedup: efficiency(speedup, N), speedup))
    if spec.strategy == "data_parallel":
        ddp = measure.reference("ddp", spec.ddp()).median_step_seconds()
        measure.metric("ddp_over_data_parallel", per_set(truediv, step.median_step_seconds(), ddp))
    return step


def slowest_alone(measure: Measure, one_device: TrainingSpec, devices: int) -> dict[str, float]:
    """Return the seconds of a step or an epoch on the slowest of the devices, each alone.

    An epoch is measured on the first device only. On the slowest device, it takes as much longer as a
    step of the same batch size does.
    """
    alone = measure.reference("one_device", one_device).slowest_device_seconds(devices)
    if not isinstance(one_device, EpochSpec):
        return alone
    step = measured_as(TrainingSpec, dataclasses.replace(one_device, input="fixed"))
    steps = measure.reference("one_device_step", step)
    first, slowest = steps.slowest_device_seconds(1), steps.slowest_device_seconds(devices)
    return per_set(lambda T1, first, slowest: T1 * slowest / first, alone, first, slowest)


@pytest.mark.specs(cases=partial(laws, weak=True))
def test_gustafson(measure: Measure, spec: TrainingSpec) -> None:
    """Which fraction of a step is serial by Gustafson's law, at a constant batch size per rank?"""
    law_metrics(measure, spec, weak=True)


@pytest.mark.specs(cases=partial(laws, weak=False))
def test_amdahl(measure: Measure, spec: TrainingSpec) -> None:
    """Which fraction of a step is serial by Amdahl's law, with a constant global batch size?"""
    law_metrics(measure, spec, weak=False)


def law_metrics(measure: Measure, spec: TrainingSpec, *, weak: bool) -> None:
    """Fit Gustafson's law (weak scaling) or Amdahl's law (strong scaling) to measured speedups.

    The serial fraction with its interval, the measured speedups, and the predictions for up to 32
    devices are stored. Base and candidate of an A/B run have their own fits.
    """
    fit, law = (fit_gustafson, gustafson_speedup) if weak else (fit_amdahl, amdahl_speedup)
    speedup_of = weak_speedup if weak else strong_speedup

    def on(devices: TrainingSpec) -> TrainingSpec:
        batch_size = spec.per_rank_batch_size if weak else spec.global_batch_size // devices.world_size
        return dataclasses.replace(devices, per_rank_batch_size=batch_size)

    step = measure(spec)
    seconds = {spec.world_size: step.median_step_seconds()}
    for N in fewer(measure, spec):
        if weak or spec.global_batch_size % N == 0:
            smaller = on(dataclasses.replace(spec, world_size=N))
            seconds[N] = measure.reference(f"world_size={N}", smaller).median_step_seconds()
    t1 = measure.reference("one_device", on(spec.one_device())).slowest_device_seconds(spec.world_size)
    sizes = sorted(seconds)
    speedups = {name: [speedup_of(t, seconds[N][name], N) for N in sizes] for name, t in t1.items()}
    fractions = per_set(lambda of_set: fit(sizes, of_set).value, speedups)
    measure.metric("serial_fraction", fractions)
    sides = sets_by_side(step)
    fits = {side: fit_sets(fit, sizes, [speedups[name] for name in names]) for side, names in sides.items()}
    together = {name: fits[side] for side, names in sides.items() for name in names}
    if all(math.isfinite(estimate.high) for estimate in fits.values()):
        for end in ("low", "high"):
            measure.metric(f"serial_fraction_{end}", per_set(attrgetter(end), together))
    for place, N in enumerate(sizes):
        measure.metric(f"speedup_of_{N}", per_set(itemgetter(place), speedups))
    cores, ranks = core_count(), measure.machine.ranks_here(spec.world_size)
    if measure.machine.device == "cpu" and ranks > cores:
        shared = f"{ranks} ranks share {cores} cores"
        measure.warn(f"{shared}, so the law is about these cores and predicts nothing for more cores")
    impossible = {side: reason for side, one in fits.items() if (reason := not_predictable(one.value))}
    for side, reason in impossible.items():
        measure.note(f"{reason}, so nothing is predicted{side}")
    if not impossible:
        for N in sorted({*sizes, *PREDICTED_DEVICES}):
            predictions(measure, law, N, fractions, together)


def predictions(
    measure: Measure, law: Law, N: int, fractions: Mapping[str, float], together: Mapping[str, Estimate]
) -> None:
    """Store the speedup and the efficiency that a law predicts for N devices.

    fractions: the serial fraction of each process set. together: for each process set, an estimate
    of the serial fraction from all process sets of the same side, base or candidate. Only this
    estimate has an interval, which is not stored if it is infinite.
    """
    predicted = per_set(lambda estimate: predicted_speedup(law, estimate, N), together)
    values = {"": per_set(lambda fraction: law(min(max(fraction, 0.0), 1.0), N), fractions)}
    if all(math.isfinite(speedup.high) for speedup in predicted.values()):
        values |= {f"_{end}": per_set(attrgetter(end), predicted) for end in ("low", "high")}
    for end, speedup in values.items():
        measure.metric(f"predicted_speedup_of_{N}{end}", speedup)
        found = per_set(lambda speedup: efficiency(speedup, N), speedup)
        measure.metric(f"predicted_efficiency_of_{N}{end}", found)
