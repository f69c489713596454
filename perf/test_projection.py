"""Projection: by how much longer than on one device does a step take on more devices than there are?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from ddpperf.analysis.projection import Excess, Projection, project, sending_error, sending_seconds
from ddpperf.analysis.protocols import FEWEST_SIZES, Chosen, choose_envelope
from ddpperf.analysis.statistics import median_and_error
from ddpperf.plugin.cases import Case, size_id, skipped
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.specs import AllReduceSpec, BucketReplaySpec, CallExecution, PartsSpec, TrainingSpec, measured_as
from perf.common.calls import backend_sizes, doubted_unless_told_apart, too_few
from perf.common.trainings import fewer, measured_apart

NORMAL = 1.4826  # of a median of absolute errors: their standard deviation, where they are normal


def steps(options: Options) -> Iterator[Case]:
    """On all devices, in the first form; with another number of devices beyond one, from which to project."""
    most = max(options.world_sizes)
    if sum(world_size > 1 for world_size in options.world_sizes) < 2:
        if options.links.project_to:
            yield skipped(
                size_id(options.device, most),
                "--project-to needs two numbers of devices above 1; add to --world-sizes",
            )
        return
    if len(sizes := backend_sizes(options.device, options.links)) < FEWEST_SIZES:
        yield skipped(size_id(options.device, most), too_few(sizes))
        return
    for batch_size in options.batch_sizes:
        yield measured_apart(BucketReplaySpec, options, most, batch_size, options.executions[0])


@pytest.mark.specs(cases=steps)
def test_projection(measure: Measure, spec: TrainingSpec) -> None:
    """The excess over t(1) on all devices, predicted from fewer, beside the measured one and the guess that it stays the same;
    then, from all of them, on as many as --project-to names and were not measured."""
    step = measure(spec)
    spec = dataclasses.replace(spec, delay_seconds=0.0)
    undelayed = measure.reference(f"world_size={spec.world_size}", spec)
    references = {
        N: measure.reference(f"world_size={N}", dataclasses.replace(spec, world_size=N))
        for N in fewer(measure, spec)
    }
    most = dataclasses.replace(spec, world_size=max(references))
    local = measure.reference("local", most.local())
    replay = measure.reference("replay", measured_as(BucketReplaySpec, most))
    one_device = measure.reference("one_device", spec.one_device())
    parts = measure.reference("parts", measured_as(PartsSpec, spec.one_device()))
    references[spec.world_size] = undelayed
    lines = {N: backend_lines(measure, N, spec) for N in references}

    told: dict[str, dict[int, Projection]] = {}
    measured = {
        name: {N: excess(reference, one_device, name) for N, reference in references.items()}
        for name in step.median_step_seconds()
    }
    for name, by_size in measured.items():
        buckets = [
            nbytes[0]
            for counter, nbytes in replay.of_set(name).counters.items()
            if counter.startswith("bucket")
        ]
        projected = partial(
            projection,
            measure,
            bookkeeping=excess(
                local, one_device, name
            ),  # and what else N devices lose without sending anything
            lines={N: each[name] for N, each in lines.items()},
            buckets=buckets,
            hideable=min(parts.of_set(name).counters["backward_seconds"]),
        )
        smaller = {N: each for N, each in by_size.items() if spec.world_size > N}
        told[name] = {}
        with doubted_unless_told_apart(measure, f"a projection on {spec.world_size} devices, of set {name},"):
            told[name][spec.world_size] = projected(smaller, spec.world_size)
        for N in measure.machine.links.project_to:
            if N not in by_size:
                with doubted_unless_told_apart(measure, f"a projection on {N} devices, of set {name},"):
                    told[name][N] = projected(by_size, N)
            elif spec.world_size > N:
                measure.note(f"{N} devices were measured, and are not projected")
    tell(measure, spec.world_size, measured, told, one_device.slowest_device_seconds(spec.world_size))


def backend_lines(measure: Measure, N: int, spec: TrainingSpec) -> dict[str, Chosen]:
    """By set, what the backend makes of buffers on N devices, captured as the training is."""
    sizes = backend_sizes(measure.machine.device, measure.machine.links)
    call: CallExecution = "graph" if spec.captured else "eager"
    specs = [AllReduceSpec(world_size=N, nbytes=nbytes, execution=call) for nbytes in sizes]
    references = [measure.reference(each.id, each).median_step_seconds() for each in specs]
    return {
        name: choose_envelope([each.nbytes for each in specs], [reference[name] for reference in references])
        for name in references[0]
    }


def excess(longer: Measured, one_device: Measured, name: str) -> Excess:
    """How much longer the slowest rank's step is, of one set, with the standard errors of both, over rounds."""
    slowest = []
    for each in (longer, one_device):
        ranks = [median_and_error(rounds) for rounds in zip(*each.of_set(name).seconds, strict=True)]
        slowest.append([value / each.iterations for value in max(ranks[: longer.spec.world_size])])
    (seconds, error), (t1, t1_error) = slowest
    return Excess(seconds=seconds - t1, error=error, one_device_error=t1_error)


def projection(
    measure: Measure,
    measured: Mapping[int, Excess],
    N: int,
    *,
    bookkeeping: Excess,
    lines: Mapping[int, Chosen],
    buckets: list[float],
    hideable: float,
) -> Projection:
    """On N devices, of one set, from the excess and the all_reduces on those measured."""
    links = measure.machine.links
    envelopes = {other: lines[other].envelope for other in measured}
    missed = {other: NORMAL * lines[other].held_out_error for other in measured}
    return project(
        measured,
        bookkeeping,
        lambda devices: sending_seconds(envelopes, buckets, devices, node=links.node, network=links.network),
        N,
        hideable=hideable,
        error=sending_error(missed, N, node=links.node),
    )


def tell(
    measure: Measure,
    largest: int,
    measured: Mapping[str, Mapping[int, Excess]],
    told: Mapping[str, Mapping[int, Projection]],
    t1: Mapping[str, float],
) -> None:
    measure.metric("excess_seconds", {name: each[largest].seconds for name, each in measured.items()})
    for N in sorted(set.intersection(*map(set, told.values()))):  # what no set leaves open
        projections = {name: each[N] for name, each in told.items()}
        if largest == N:
            measure.metric("plain_excess_seconds", {name: each.plain for name, each in projections.items()})
            if all(each[N].seconds > 0 for each in measured.values()):
                off = {
                    name: each.seconds / measured[name][N].seconds - 1 for name, each in projections.items()
                }
                measure.metric("projection_error", off)
        measure.metric(f"projected_excess_on_{N}", {name: each.seconds for name, each in projections.items()})
        measure.metric(f"projected_excess_on_{N}_low", {name: each.low for name, each in projections.items()})
        measure.metric(
            f"projected_excess_on_{N}_high", {name: each.high for name, each in projections.items()}
        )
        if largest != N:
            efficiency = {name: t1[name] / (t1[name] + each.seconds) for name, each in projections.items()}
            measure.metric(f"projected_efficiency_on_{N}", efficiency)
