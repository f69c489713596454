"""Communication: how much longer is a DDP step because the ranks exchange gradients?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from ddpperf.analysis.bandwidth import all_reduce_busbw
from ddpperf.analysis.comm_split import Difference, Traced, difference, disagreement, last_rank, traced
from ddpperf.plugin.cases import Case, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.specs import BucketReplaySpec, Model, TraceSpec, TrainingSpec, measured_as
from perf.common import core
from perf.common.training_metrics import training_metrics
from perf.common.trainings import RESNET50_BATCH, measured_also_as, resnet50

TRACED = ("compute_seconds", "copy_seconds", "idle_seconds", "traced_step_seconds")


def splits(options: Options) -> Iterator[Case]:
    """Yield DDP training specs for each world size and batch size.

    Each is measured in the first execution mode of --executions and in eager mode.
    """
    if max(options.world_sizes) == 1:
        yield skipped(size_id(options.device, 1), "one device communicates nothing; pass --world-sizes 1,2")
    for world_size in options.world_sizes:
        for batch_size in options.batch_sizes if world_size > 1 else ():
            for execution in dict.fromkeys((options.executions[0], "eager")):
                yield measured_also_as(BucketReplaySpec, options, world_size, batch_size, execution)
    yield from resnet50(options, partial(deeper, options), least=2)


def deeper(options: Options, model: Model, world_size: int) -> Case:
    """Return the training spec of a ResNet-50 in the first execution mode."""
    execution = options.executions[0]
    return measured_also_as(BucketReplaySpec, options, world_size, RESNET50_BATCH, execution, model=model)


@pytest.mark.specs(cases=splits, core=core.comm_split)
def test_comm_split(measure: Measure, spec: TrainingSpec) -> None:
    """How long does a DDP step only wait for communication, while no computation runs?

    Three methods measure the communication: a step without communication, a profiler trace, and a
    replay of the messages alone. Beside them stands t(N) - t(1), the extra step time on N devices.
    """
    step = measure(spec)
    spec = dataclasses.replace(spec, delay_seconds=0.0)  # the delay of --slow-down is no part of the step
    undelayed = measure.reference("ddp", spec)
    ddp, no_sync = by_rank(undelayed), by_rank(measure.reference("no_sync", spec.no_sync()))
    local = by_rank(measure.reference("local", spec.local()))
    trace = measure.reference("trace", measured_as(TraceSpec, spec))
    replay = measure.reference("replay", measured_as(BucketReplaySpec, spec))
    t1 = measure.reference("one_device", spec.one_device()).slowest_device_seconds(spec.world_size)

    tN = undelayed.median_step_seconds()
    differences = {name: difference(ddp[name], no_sync[name], local[name]) for name in ddp}
    traces = traced_by_set(trace)
    seconds = {
        "exposed_comm_seconds": {name: split.exposed for name, split in differences.items()},
        "traced_exposed_comm_seconds": {name: split.exposed for name, split in traces.items()},
        "traced_comm_seconds": {name: split.total for name, split in traces.items()},
        "comm_without_waiting_seconds": {name: split.least_total for name, split in traces.items()},
        "replayed_comm_seconds": replay.median_step_seconds(),
        "step_minus_one_device_seconds": {name: tN[name] - t1[name] for name in tN},
        "bucket_copy_seconds": {name: split.bucket_copies for name, split in differences.items()},
        "comm_skew_seconds": {name: split.skew for name, split in differences.items()},
        "traced_comm_skew_seconds": {name: split.skew for name, split in traces.items()},
    }
    for name in TRACED if traces else ():
        seconds[name] = {
            sample.set: sample.counters[name][traces[sample.set].rank] for sample in trace.samples
        }
    for name, by_set in seconds.items():
        if by_set:
            measure.metric(name, by_set)
    if traces:
        measure.metric("overlap_fraction", {name: split.overlap_fraction for name, split in traces.items()})
        compared(measure, tN, trace, differences, traces)
    else:
        measure.note("no trace: the profiler saw no communication; --worker-logs DIR keeps its messages")
    late = {last_rank(differences[name], traces.get(name), tN[name]) for name in tN}
    for sentence in sorted(late - {""}):
        measure.note(sentence)
    bandwidths(measure, replay, trace, traces)
    training_metrics(measure, step)


def by_rank(measured: Measured) -> dict[str, list[float]]:
    """Return the step time, in seconds, on each rank of each process set."""
    return {sample.set: measured.rank_step_seconds(sample) for sample in measured.samples}


def traced_by_set(trace: Measured) -> dict[str, Traced]:
    """Return the communication time found in the profiler traces of each process set.

    Returns an empty dict if the traces of any process set show no communication.
    """
    found = {
        sample.set: traced(sample.counters["comm_seconds"], sample.counters["exposed_comm_seconds"])
        for sample in trace.samples
        if "comm_seconds" in sample.counters
    }
    known = {name: split for name, split in found.items() if split is not None}
    return known if len(known) == len(trace.samples) else {}


def compared(
    measure: Measure,
    tN: Mapping[str, float],
    trace: Measured,
    differences: Mapping[str, Difference],
    traces: Mapping[str, Traced],
) -> None:
    """Store the difference of two exposed communication results, as a fraction of the step time.

    One measurement is by difference of step times, the other one by profiler trace. A note on the
    measurement explains a large difference. tN: the seconds of a step in each process set.
    """
    profiled = trace.counter("traced_step_seconds")
    apart = {name: disagreement(differences[name], traces[name], tN[name], profiled[name]) for name in traces}
    measure.metric("method_disagreement", {name: fraction for name, (fraction, _) in apart.items()})
    for _, reason in apart.values():
        if reason:
            measure.warn(reason)


def bandwidths(measure: Measure, replay: Measured, trace: Measured, traces: Mapping[str, Traced]) -> None:
    """Store the bus bandwidth at which gradients are sent during training.

    One bandwidth divides by the time of the all-reduces on the rank that waits least. The other one
    divides by the exposed communication time. If the link bandwidth is known, store its used
    fractions, too.
    """
    N, nbytes = replay.spec.world_size, replay.counter("gradient_bytes")
    sending = {
        split.set: min(split.counters["all_reduce_seconds"][:N])
        for split in trace.samples
        if split.set in traces
    }
    exposed = {name: split.exposed for name, split in traces.items()}
    for what, seconds in (("", sending), ("exposed_", exposed)):
        if seconds and all(seconds.values()):
            busbw = {name: all_reduce_busbw(nbytes[name], t, N) for name, t in seconds.items()}
            measure.metric(f"gradient_busbw_{what}bytes_per_second", busbw)
            if link := measure.machine.link_bytes_per_second:
                measure.metric(
                    f"{what}link_utilization", {name: value / link for name, value in busbw.items()}
                )
