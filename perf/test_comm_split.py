"""Communication: how much longer is a step of DDP or DataParallel because the devices communicate?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import product
from operator import itemgetter, sub

import pytest

from ddpperf.analysis.bandwidth import all_reduce_busbw
from ddpperf.analysis.comm_split import NOT_SENDING, WITHOUT_WAITING, disagreement, longest_wait, traced
from ddpperf.plugin.cases import Case, case, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import Measured
from ddpperf.specs import DATA_PARALLEL_PARTS, BucketReplaySpec, TraceSpec, TrainingSpec, measured_as
from perf.common.all_reduces import link_utilization
from perf.common.by_set import by_rank, per_set
from perf.common.step_metrics import training_metrics
from perf.common.step_specs import one_process, resnet50, step_case

COMPARED = ("traced_exposed_comm_seconds", "traced_comm_seconds")  # measured for DataParallel and for DDP
NO_TRACE = "no trace: the profiler saw no communication; --worker-logs DIR keeps its messages"


def splits(options: Options) -> Iterator[Case]:
    """Yield DDP training specs for each world size and batch size.

    Each is measured in the first execution mode of --executions and in eager mode. The core suite
    has the first mode on all devices with the largest batch size.
    """
    first, most = options.executions[0], max(options.world_sizes)
    if most == 1:
        yield skipped(size_id(options, 1), "one device communicates nothing; pass --world-sizes 1,2")
    several = [N for N in options.world_sizes if N > 1]
    for N, batch_size, execution in product(several, options.batch_sizes, dict.fromkeys((first, "eager"))):
        core = most == N and batch_size == max(options.batch_sizes) and execution == first
        yield case(step_case(options, N, batch_size, execution, kind=BucketReplaySpec), core=core)
    yield from resnet50(options, BucketReplaySpec, least=2)


@pytest.mark.specs(cases=splits)
def test_comm_split(measure: Measure, spec: TrainingSpec) -> None:
    """How long does a DDP step only wait for communication, while no computation runs?

    Three methods measure the communication: a step without communication, a profiler trace, and a
    replay of the messages without computation. The extra step time on N devices, t(N) - t(1), is
    stored for comparison.
    """
    step = measure(spec)
    training_metrics(measure, step)  # before the references, which a repeated measurement leaves out
    spec = dataclasses.replace(spec, delay_seconds=0.0)  # a delay is no part of the step
    ddp = measure.reference("ddp", spec)
    no_sync = measure.reference("no_sync", spec.no_sync())
    local = measure.reference("local", spec.local())
    trace = measure.reference("trace", measured_as(TraceSpec, spec))
    replay = measure.reference("replay", measured_as(BucketReplaySpec, spec))
    t1 = measure.reference("one_device", spec.one_device()).slowest_device_seconds(spec.world_size)

    tN = ddp.median_step_seconds()
    exposed, bucket_copies = exposed_by_difference(ddp, no_sync), exposed_by_difference(local, no_sync)
    measure.metric("exposed_comm_seconds", exposed)
    measure.metric("replayed_comm_seconds", replay.median_step_seconds())
    measure.metric("step_minus_one_device_seconds", per_set(sub, tN, t1))
    measure.metric("bucket_copy_seconds", bucket_copies)
    # How much longer the slowest rank takes than the fastest one, in a step that waits for no rank
    measure.metric("comm_skew_seconds", per_set(lambda ranks: max(ranks) - min(ranks), by_rank(local)))
    if traces := traced_by_set(trace):
        for name in dict.fromkeys(name for of_set in traces.values() for name in of_set):
            traced_metric(measure, name, traces)
        disagreement_metric(measure, exposed, trace, tN, bucket_copies, "bucket copies")
        gradient_bandwidth(measure, replay, trace)
    else:
        measure.note(NO_TRACE)
    if measure.machine.crosses_nodes(spec.world_size):
        exposed_by_link(measure, ddp, local, exposed)


def exposed_by_link(measure: Measure, step: Measured, local: Measured, exposed: Mapping[str, float]) -> None:
    """Store how much of the exposed communication is inside a node, and how much between nodes.

    The same step, with the same batch size per rank, is measured on one node's ranks. Its
    computation and its gradients are the same, so its exposed communication is that inside a node.
    The rest comes from the slower link, the longer ring, and waiting for ranks of other nodes. The
    rest is a difference of two steps. It is not a part of the step that a trace could show, because
    in a flat ring across nodes all messages have the pace of the slowest link, also those inside a
    node. Within the noise, it may be negative.

    A node with one rank sends nothing inside the node. In this case the step is compared with
    `local`, in which ranks fill their buckets and send nothing.
    """
    size = measure.machine.links.node
    if size == 1:
        measure.metric("exposed_between_nodes_seconds", exposed_by_difference(step, local))
        return
    assert isinstance(step.spec, TrainingSpec)
    one_node = dataclasses.replace(step.spec, world_size=size)
    inside = exposed_by_difference(
        measure.reference("one_node", one_node), measure.reference("one_node_no_sync", one_node.no_sync())
    )
    measure.metric("exposed_inside_node_seconds", inside)
    measure.metric("exposed_between_nodes_seconds", per_set(sub, exposed, inside))


def exposed_by_difference(step: Measured, no_sync: Measured) -> dict[str, float]:
    """Return by how many seconds communication makes the step longer, on the rank that waits most."""
    return per_set(longest_wait, by_rank(step), by_rank(no_sync))


def traced_metric(
    measure: Measure, name: str, traces: Mapping[str, Mapping[str, float]], stored_as: str = ""
) -> None:
    """Store a metric of the traces of each process set that has it: older code in an A/B run may not."""
    if by_set := {process_set: found[name] for process_set, found in traces.items() if name in found}:
        measure.metric(stored_as or name, by_set)


def traced_by_set(trace: Measured) -> dict[str, dict[str, float]]:
    """Return the metrics of the profiler traces of each process set.

    Returns an empty dict if the traces of any process set show no communication.
    """
    found = {sample.set: traced(sample.counters) for sample in trace.samples}
    return found if all(found.values()) else {}


def disagreement_metric(
    measure: Measure,
    exposed: Mapping[str, float],
    trace: Measured,
    tN: Mapping[str, float],
    known: Mapping[str, float],
    cause: str,
) -> None:
    """Store the disagreement of two methods as a fraction of the step, and warn with its known causes.

    exposed: the exposed communication by difference of step times; the other method is the trace.
    tN: the seconds of a step. known: the seconds that the difference contains and the trace does
    not. cause: what these seconds are.
    """
    by_trace = per_set(itemgetter("traced_exposed_comm_seconds"), traced_by_set(trace))
    apart = per_set(sub, exposed, by_trace)
    found = per_set(
        lambda apart, known, tN, profiled: disagreement(apart, known, cause, tN, profiled),
        *(apart, known, tN, trace.counter("traced_step_seconds")),
    )
    measure.metric("method_disagreement", per_set(itemgetter(0), found))
    for _, reason in found.values():
        if reason:
            measure.warn(reason)


def gradient_bandwidth(measure: Measure, replay: Measured, trace: Measured) -> None:
    """Store the bus bandwidth at which gradients are sent during training, and the used fraction of the link.

    The bytes are divided by the time of the all_reduces, without waiting for other ranks.
    """
    N, nbytes = replay.spec.world_size, replay.counter("gradient_bytes")
    sending = trace.counter("all_reduce_without_waiting_seconds")
    if sending and all(sending.values()):
        busbw = {name: all_reduce_busbw(nbytes[name], t, N) for name, t in sending.items()}
        measure.metric("gradient_busbw_bytes_per_second", busbw)
        link_utilization(measure, busbw, N)


# --- DataParallel


def data_parallel_splits(options: Options) -> Iterator[Case]:
    """Yield DataParallel training specs for each number of GPUs and batch size per GPU."""
    if max(options.world_sizes) == 1:
        reason = "DataParallel communicates between GPUs and needs two, found 1; pass --world-sizes 1,2"
        yield skipped(size_id(options, 1), reason)
    for N, batch_size in product(options.world_sizes, options.batch_sizes):
        yield from one_process(options, N, batch_size, core=False)


@pytest.mark.specs(cases=data_parallel_splits)
def test_data_parallel_split(measure: Measure, spec: TrainingSpec) -> None:
    """How long does a step of torch's DataParallel communicate, in which parts, and compared with DDP?

    Two methods measure the communication: a step that keeps its replicas and sends nothing, and a
    profiler trace, in which each kernel and copy belongs to the part that launched it.
    """
    step = measure(spec)
    training_metrics(measure, step)
    spec = dataclasses.replace(spec, delay_seconds=0.0)  # a delay is no part of the step
    undelayed = measure.reference("data_parallel", spec)
    exposed = exposed_by_difference(undelayed, measure.reference("no_sync", spec.no_sync()))
    trace = measure.reference("trace", measured_as(TraceSpec, spec))
    t1 = measure.reference("one_device", spec.one_device()).slowest_device_seconds(spec.world_size)
    ddp = spec.ddp()
    ddp_exposed = exposed_by_difference(
        measure.reference("ddp", ddp), measure.reference("ddp_no_sync", ddp.no_sync())
    )
    ddp_trace = measure.reference("ddp_trace", measured_as(TraceSpec, ddp))

    tN = undelayed.median_step_seconds()
    measure.metric("exposed_comm_seconds", exposed)
    measure.metric("ddp_exposed_comm_seconds", ddp_exposed)
    measure.metric("step_minus_one_device_seconds", per_set(sub, tN, t1))
    traces, ddp_traces = traced_by_set(trace), traced_by_set(ddp_trace)
    for name in (*COMPARED, WITHOUT_WAITING):
        traced_metric(measure, name, ddp_traces, f"ddp_{name}")
    if not traces:
        measure.note(NO_TRACE)
        return
    for name in (*COMPARED, "overlap_fraction", *NOT_SENDING):
        traced_metric(measure, name, traces)
    for counter in (*(f"{part}_seconds" for part in DATA_PARALLEL_PARTS), "idle_in_comm_seconds"):
        measure.metric(counter, trace.counter(counter))
    idle = trace.counter("idle_in_comm_seconds")
    disagreement_metric(measure, exposed, trace, tN, idle, "GPUs that wait for the CPU in these parts")
    if unassigned := max(trace.counter("unassigned_operations").values()):
        what = f"{unassigned:g} kernels and copies per step"
        measure.warn(f"{what} have no launch in the trace, so they count as computation")
    if sending := ddp_trace.counter(WITHOUT_WAITING):
        communicating = trace.counter("comm_seconds")
        measure.metric("comm_over_ddp", per_set(lambda t, many: many / t, sending, communicating))
