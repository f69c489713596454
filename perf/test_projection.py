"""Projection: how much longer would a training step take on more devices than this machine has?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from operator import attrgetter

import pytest

from ddpperf.analysis.cost_models import FEWEST_SIZES, choose_lines
from ddpperf.analysis.projection import NCCL_PAIR_BANDWIDTH, AllReduces, Excess, project, projected_from
from ddpperf.analysis.statistics import Estimate, median_and_error
from ddpperf.machine.hardware import Machine
from ddpperf.plugin.cases import Case, case, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.specs import (
    AllReduceSpec,
    BucketReplaySpec,
    CallExecution,
    PartsSpec,
    TrainingSpec,
    format_bytes,
    measured_as,
)
from perf.common.all_reduces import backend_sizes, estimate_metric, too_few, warn_if_undetermined
from perf.common.by_set import per_set
from perf.common.step_specs import fewer, step_case, too_few_world_sizes

Times = Mapping[int, float]  # seconds of all-reduces by their bytes


def steps(options: Options) -> Iterator[Case]:
    """Yield DDP training specs on all devices, for each batch size.

    They are skipped unless --world-sizes has a smaller world size above 1 to project from. The core
    suite has the largest batch size.
    """
    most = max(options.world_sizes)
    if reason := too_few_world_sizes(options, options.world_sizes):
        yield skipped(size_id(options, most), reason)
        return
    if len(sizes := backend_sizes(options.device, options.links)) < FEWEST_SIZES:
        yield skipped(size_id(options, most), too_few(sizes))
        return
    for batch_size in options.batch_sizes:
        step = step_case(options, most, batch_size, kind=BucketReplaySpec)
        yield case(step, core=batch_size == max(options.batch_sizes))


@pytest.mark.specs(cases=steps)
def test_projection(measure: Measure, spec: TrainingSpec) -> None:
    """Can the extra step time t(N) - t(1) on all devices be predicted from fewer devices?

    The prediction is compared with the guess that more devices leave the extra step time unchanged.
    --project-to asks for predictions for world sizes that were not measured.
    """
    step, N = measure(spec), spec.world_size
    spec = dataclasses.replace(spec, delay_seconds=0.0)
    smaller = fewer(measure, spec)
    steps = {
        size: measure.reference(f"world_size={size}", dataclasses.replace(spec, world_size=size))
        for size in (N, *smaller)
    }
    most = dataclasses.replace(spec, world_size=max(smaller))
    local = measure.reference("local", most.local())
    replay = measure.reference("replay", measured_as(BucketReplaySpec, most))
    one_device = measure.reference("one_device", spec.one_device())
    parts = measure.reference("parts", measured_as(PartsSpec, spec.one_device()))
    times = {size: backend_times(measure, size, spec) for size in (*smaller, N)}

    sets = [sample.set for sample in step.samples]
    measured = {size: {name: excess(step, one_device, name) for name in sets} for size, step in steps.items()}
    measure.metric("excess_seconds", per_set(attrgetter("seconds"), measured[N]))

    def projected(name: str, target: int) -> Estimate:
        counters = replay.of_set(name).counters
        return projection(
            measure.machine,
            {size: found[name] for size, found in measured.items() if size < N or target != N},
            target,
            bucket_copies=excess(local, one_device, name),  # the extra time without communication
            times={size: found[name] for size, found in times.items()},
            buckets=[sent[0] for what, sent in counters.items() if what.startswith("bucket")],
            hideable=min(parts.of_set(name).counters["backward_seconds"]),
        )

    for target in (N, *(to for to in measure.machine.links.project_to if to not in steps)):
        with warn_if_undetermined(measure, f"the projection on {target} devices"):
            projections = {name: projected(name, target) for name in sets}
            estimate_metric(measure, f"projected_excess_on_{target}", projections)
            if target == N:
                compare(measure, projections, measured[max(smaller)], measured[N])
            else:
                t1 = one_device.slowest_device_seconds(N)
                efficiency = per_set(lambda found, t1: t1 / (t1 + found.value), projections, t1)
                measure.metric(f"projected_efficiency_on_{target}", efficiency)


def backend_times(measure: Measure, N: int, spec: TrainingSpec) -> dict[str, Times]:
    """Return the seconds of NCCL's or gloo's all-reduces on N ranks, for each process set.

    The all-reduces run in a CUDA graph if the training step does.
    """
    mode: CallExecution = "graph" if spec.captured else "eager"
    times: dict[str, dict[int, float]] = {}
    for nbytes in backend_sizes(measure.machine.device, measure.machine.links):
        call = AllReduceSpec(world_size=N, nbytes=nbytes, execution=mode)
        name = f"world_size={N}-{format_bytes(nbytes)}-backend-{mode}"
        for of_set, seconds in measure.reference(name, call).median_step_seconds().items():
            times.setdefault(of_set, {})[nbytes] = seconds
    return dict(times)


def excess(longer: Measured, one_device: Measured, name: str) -> Excess:
    """Return one process set's extra step time compared with one device, and its standard error.

    Both step times are those of the slowest rank.
    """
    slowest = []
    for step in (longer, one_device):
        ranks = [median_and_error(rounds) for rounds in zip(*step.of_set(name).seconds, strict=True)]
        slowest.append([value / step.iterations for value in max(ranks[: longer.spec.world_size])])
    (seconds, error), (t1, t1_error) = slowest
    return Excess(seconds=seconds - t1, error=error, one_device_error=t1_error)


def projection(
    machine: Machine,
    measured: Mapping[int, Excess],
    N: int,
    *,
    times: Mapping[int, Times],
    bucket_copies: Excess,
    buckets: list[float],
    hideable: float,
) -> Estimate:
    """Predict the extra step time on N devices, compared with one device, for one process set.

    measured, times: the extra step time and the all-reduces of each smaller world size. Projections
    to several nodes use measurements on several nodes, if there are any. The remaining parameters
    are passed to `project`.
    """
    chosen = projected_from(measured, N, node=machine.links.node)
    all_reduces = AllReduces(
        models={other: choose_lines(list(times[other]), list(times[other].values())) for other in chosen},
        node=machine.links.node,
        network=machine.links.network,
        pair_bandwidth=NCCL_PAIR_BANDWIDTH if machine.device == "cuda" else 1.0,
    )
    excesses = {other: measured[other] for other in chosen}
    return project(excesses, bucket_copies, all_reduces, buckets, N, hideable=hideable)


def compare(
    measure: Measure,
    projections: Mapping[str, Estimate],
    smaller: Mapping[str, Excess],
    measured: Mapping[str, Excess],
) -> None:
    """Compare a projection with the measured extra step time, and with the guess that it stays the same.

    smaller: the extra step time on the largest smaller number of devices.
    """
    measure.metric("plain_excess_seconds", per_set(attrgetter("seconds"), smaller))
    if all(found.seconds > 0 for found in measured.values()):
        error = per_set(lambda found, true: found.value / true.seconds - 1, projections, measured)
        measure.metric("projection_error", error)
