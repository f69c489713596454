"""Projection: how much longer would a training step take on more devices than this machine has?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import pytest

from ddpperf.analysis.library_cost_model import FEWEST_SIZES, choose_envelope
from ddpperf.analysis.logarithmic_fit import Estimate
from ddpperf.analysis.projection import (
    NCCL_PAIR_BANDWIDTH,
    AllReduces,
    Excess,
    project,
    projected_from,
)
from ddpperf.analysis.statistics import median_and_error
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
NORMAL = 1.4826  # the standard deviation of normal errors over the median of their absolute values


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

    measured: dict[str, dict[int, Excess]] = {}
    projections: dict[str, dict[int, Estimate]] = {}
    for name in step.median_step_seconds():
        measured[name] = {size: excess(found, one_device, name) for size, found in steps.items()}
        counters = replay.of_set(name).counters
        projections[name] = {}
        for target in (N, *(to for to in measure.machine.links.project_to if to not in steps)):
            with warn_if_undetermined(measure, f"process set {name}'s projection on {target} devices"):
                projections[name][target] = projection(
                    measure,
                    {size: found for size, found in measured[name].items() if size < N or target != N},
                    target,
                    bucket_copies=excess(local, one_device, name),  # the extra time without communication
                    times={size: by_set[name] for size, by_set in times.items()},
                    buckets=[sent[0] for what, sent in counters.items() if what.startswith("bucket")],
                    hideable=min(parts.of_set(name).counters["backward_seconds"]),
                )
    projection_metrics(measure, N, measured, projections, one_device.slowest_device_seconds(N))


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
    measure: Measure,
    measured: Mapping[int, Excess],
    N: int,
    *,
    bucket_copies: Excess,
    times: Mapping[int, Times],
    buckets: list[float],
    hideable: float,
) -> Estimate:
    """Predict the extra step time on N devices, compared with one device, for one process set.

    measured: the extra step time of each smaller world size. times: the all-reduces of each smaller
    world size. Of both, projections to several nodes use the measurements on several
    nodes, if there are any. buckets: the bytes of each gradient bucket. hideable: the seconds of
    computation that can hide communication.
    """
    links = measure.machine.links
    measured = {other: measured[other] for other in projected_from(measured, N, node=links.node)}
    chosen = {other: choose_envelope(list(times[other]), list(times[other].values())) for other in measured}
    all_reduces = AllReduces(
        lines={other: found.envelope for other, found in chosen.items()},
        node=links.node,
        network=links.network,
        pair_bandwidth=NCCL_PAIR_BANDWIDTH if measure.machine.device == "cuda" else 1.0,
    )
    errors = {other: NORMAL * found.held_out_error for other, found in chosen.items()}
    return project(
        measured,
        bucket_copies,
        {devices: all_reduces.sending(buckets, devices) for devices in (*measured, N)},
        N,
        hideable=hideable,
        error=all_reduces.sending_error(errors, N),
    )


def projection_metrics(
    measure: Measure,
    largest: int,
    measured: Mapping[str, Mapping[int, Excess]],
    by_set: Mapping[str, Mapping[int, Estimate]],
    t1: Mapping[str, float],
) -> None:
    """Store the measured and the predicted extra step time compared with one device.

    The measured value is that of the largest world size. A prediction is stored if every process
    set has it. t1: the single-device step time of each process set, in seconds.
    """
    measure.metric("excess_seconds", per_set(lambda excesses: excesses[largest].seconds, measured))
    projected_to = set.intersection(*map(set, by_set.values()))
    if largest in projected_to:
        smaller = max(size for found in measured.values() for size in found if size < largest)
        measure.metric("plain_excess_seconds", per_set(lambda found: found[smaller].seconds, measured))
        if all(excesses[largest].seconds > 0 for excesses in measured.values()):
            predicted = per_set(lambda found: found[largest].value, by_set)
            excess = per_set(lambda found: found[largest].seconds, measured)
            measure.metric("projection_error", per_set(lambda ours, true: ours / true - 1, predicted, excess))
    for N in sorted(projected_to):
        projections = {name: found[N] for name, found in by_set.items()}
        estimate_metric(measure, f"projected_excess_on_{N}", projections)
        if largest != N:
            efficiency = per_set(lambda found, t1: t1 / (t1 + found.value), projections, t1)
            measure.metric(f"projected_efficiency_on_{N}", efficiency)
