"""All-reduce: which algorithm is the fastest, and does a cost model predict the measured times?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter, sub, truediv
from statistics import median

import pytest

from ddpperf.analysis.bandwidth import algbw, all_reduce_busbw, collective_busbw, crossing_factor
from ddpperf.analysis.cost_models import FEWEST_SIZES, CostModel, choose_cost_model, choose_lines
from ddpperf.analysis.statistics import Estimate, fastest
from ddpperf.machine.hardware import Links
from ddpperf.plugin.cases import Case, case, size_id, skipped
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results import units
from ddpperf.results.samples import Measured
from ddpperf.specs import AllReduceSpec, CallExecution, CollectiveSpec, SingleCallsSpec, format_bytes
from ddpperf.specs.collective import (
    CAPTURED_ALGORITHMS,
    LOW_LATENCY_BYTES,
    OWN_ALGORITHMS,
    Algorithm,
    CollectiveKind,
    ElementType,
)
from perf.common.all_reduces import (
    backend_sizes,
    estimate_metric,
    link_utilization,
    too_few,
    warn_if_undetermined,
)
from perf.common.by_set import per_set, sets_by_side

OWN_SIZES = (2**12, 2**16, 2**20, 2**24)  # for the algorithms made of messages between ranks
RING_SIZE = 2**26  # of the algorithms in `own` only the ring is measured at this size or more
SINGLE_CALL_SIZES = (2**16, 2**20, 2**24)
TAILS = (
    *(f"call_{end}_seconds" for end in ("p50", "p99", "largest")),
    *("late_rank", "late_fraction", "late_seconds", "event_seconds"),
)
MOSTLY_LATE = 0.8  # of the slowest calls: a rank that is late so often is named
ONE_RANK = "a collective needs two ranks or more; pass --world-sizes 1,2"
# Of all collectives on GPUs, also in the gate, where NCCL is measured in both types
COLLECTIVE_SIZES, GPU_COLLECTIVE_SIZES = (2**24,), (2**16, 2**20, 2**24, 2**28)
GPU_TYPES: tuple[ElementType, ...] = ("fp32", "bf16")
LEAST_GATE_BYTES = 2**24  # of two_shot, which own_ddp uses for large buckets
KINDS: tuple[CollectiveKind, ...] = ("reduce_scatter", "all_gather", "broadcast", "all_to_all")
# The execution mode in which all-reduces are compared. On GPUs, eager ones wait for launches on the CPU.
EXECUTION: Mapping[str, CallExecution] = {"cuda": "graph", "cpu": "eager"}
# The usual standard deviation of a call's log seconds between runs: in a CUDA graph, and on a CPU.
USUAL_SPREAD: Mapping[CallExecution, float] = {"graph": 0.0035, "eager": 0.2}


def own_sizes(links: Links) -> Sequence[int]:
    """Return the buffer sizes, in bytes, for this project's own all-reduce algorithms."""
    return links.buffer_sizes or (*OWN_SIZES, RING_SIZE)


def largest_of_all(links: Links) -> int:
    """Return the largest buffer size, in bytes, at which all of this project's algorithms run.

    If only the ring algorithm has sizes, return the ring's largest size.
    """
    sizes = own_sizes(links)
    return max([nbytes for nbytes in sizes if nbytes < RING_SIZE] or sizes)


def captured(N: int, nbytes: int) -> list[AllReduceSpec]:
    """Return a measurement spec for each all-reduce algorithm that can run in a CUDA graph."""
    return [
        AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm, execution="graph")
        for algorithm in CAPTURED_ALGORITHMS
        if algorithm != "low_latency" or nbytes <= LOW_LATENCY_BYTES
    ]


def own(N: int, nbytes: int, links: Links) -> list[AllReduceSpec]:
    """Return a measurement spec for each of this project's own algorithms that treat ranks alike.

    If the ranks fill several nodes, the hierarchical all-reduce is one of them.
    """
    algorithms: tuple[Algorithm, ...] = OWN_ALGORITHMS if nbytes < RING_SIZE else ("ring",)
    calls = [AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm) for algorithm in algorithms]
    if 1 < links.node < N and N % links.node == 0:
        calls.append(dataclasses.replace(calls[0], algorithm="hierarchical", node_size=links.node))
    return calls


def modelled(N: int, nbytes: int, links: Links) -> list[AllReduceSpec]:
    """Return a measurement spec for each of this project's own algorithms that has a cost model.

    On several nodes, these are the flat ring and the hierarchical all-reduce.
    """
    known = OWN_ALGORITHMS if links.node >= N else ("ring", "hierarchical")
    return [call for call in own(N, nbytes, links) if call.algorithm in known]


def on_several_ranks(
    cases_on: Callable[[Options, int], Iterator[Case]],
) -> Callable[[Options], Iterator[Case]]:
    """Return a function that yields the cases of each world size above 1, in descending order.

    After a smaller group of ranks mapped its memory, a larger group would need a new process set.
    With a single rank, which has nobody to communicate with, it yields a skipped case.
    """

    def cases(options: Options) -> Iterator[Case]:
        for world_size in reversed(options.world_sizes):
            if world_size > 1:
                yield from cases_on(options, world_size)
        if max(options.world_sizes) == 1:
            yield skipped(size_id(options, 1), ONE_RANK)

    return cases


@on_several_ranks
def calls(options: Options, N: int) -> Iterator[Case]:
    """Yield measurement specs of all-reduces on N ranks for every buffer size and algorithm.

    Some large all-reduces are measured out of place, too. The core suite uses the largest world
    size only: NCCL or gloo at all sizes, and the other algorithms at one large size. On GPUs, the
    gate selects all-reduces in a CUDA graph on all GPUs: NCCL's in fp32 and bf16, and large ones by
    two_shot. On a CPU it selects none, because gloo's times differ by a fifth between process sets.
    """
    most, sizes = max(options.world_sizes) == N, options.links.buffer_sizes or GPU_COLLECTIVE_SIZES
    for call in (*in_place(options, N), *out_of_place(options, N)):
        by_nccl, usual = call.algorithm == "backend", call.dtype == "fp32"
        large = call.algorithm == "two_shot" and call.nbytes >= LEAST_GATE_BYTES
        gate = most and call.captured and call.in_place and call.nbytes in sizes and (by_nccl or large)
        one_size = by_nccl or call.nbytes == largest_of_all(options.links)
        yield case(call, core=most and call.in_place and usual and (one_size or gate), gate=gate)


def in_place(options: Options, N: int) -> Iterator[AllReduceSpec]:
    """Yield measurement specs of all in-place all-reduces on N ranks."""
    for nbytes in backend_sizes(options.device, options.links):
        yield AllReduceSpec(world_size=N, nbytes=nbytes)
        if options.device == "cuda":
            yield from captured(N, nbytes)
            yield AllReduceSpec(world_size=N, nbytes=nbytes, dtype="bf16", execution="graph")
    for nbytes in own_sizes(options.links):
        yield from own(N, nbytes, options.links)


def out_of_place(options: Options, N: int) -> Iterator[AllReduceSpec]:
    """Yield measurement specs of out-of-place all-reduces on a large buffer.

    On GPUs every algorithm is measured, and the smallest buffer, too, in a CUDA graph.
    """
    nbytes = largest_of_all(options.links)
    calls = [AllReduceSpec(world_size=N, nbytes=nbytes)]
    if options.device == "cuda":
        sizes = dict.fromkeys((min(backend_sizes(options.device, options.links)), nbytes))
        calls = [*own(N, nbytes, options.links), *(call for size in sizes for call in captured(N, size))]
    yield from (dataclasses.replace(call, in_place=False) for call in calls)


@on_several_ranks
def largest(options: Options, N: int) -> Iterator[Case]:
    """Yield the measurement spec of the largest NCCL or gloo all-reduce on N ranks."""
    sizes = backend_sizes(options.device, options.links)
    if len(sizes) < FEWEST_SIZES:
        yield skipped(size_id(options, N), too_few(sizes))
    else:
        call = AllReduceSpec(world_size=N, nbytes=max(sizes), execution=EXECUTION[options.device])
        yield case(call, core=max(options.world_sizes) == N)


@on_several_ranks
def contests(options: Options, N: int) -> Iterator[Case]:
    """Yield measurement specs of NCCL's or gloo's all-reduce, to compare with other algorithms."""
    for nbytes in backend_sizes(options.device, options.links):
        if options.device == "cuda" or nbytes in own_sizes(options.links):
            call = AllReduceSpec(world_size=N, nbytes=nbytes, execution=EXECUTION[options.device])
            core = max(options.world_sizes) == N and nbytes == largest_of_all(options.links)
            yield case(call, core=core)


@on_several_ranks
def algorithms(options: Options, N: int) -> Iterator[Case]:
    """Yield a measurement spec for each of this project's own all-reduce algorithms with a cost model.

    The buffer has the largest size at which all of them are measured.
    """
    sizes = own_sizes(options.links)
    if len(sizes) < FEWEST_SIZES:
        yield skipped(size_id(options, N), too_few(sizes))
    else:
        for call in modelled(N, largest_of_all(options.links), options.links):
            yield case(call, core=False)


@on_several_ranks
def collectives(options: Options, N: int) -> Iterator[Case]:
    """Yield measurement specs of reduce_scatter, all_gather, broadcast and all_to_all.

    Buffer sizes are rounded down so that each rank has the same number of elements. The core suite
    uses the largest world size, and one large size in fp32 only. On GPUs, the gate uses all sizes in
    fp32 and in bf16.
    """
    most, on_gpu = max(options.world_sizes) == N, options.device == "cuda"
    usual = GPU_COLLECTIVE_SIZES if on_gpu else COLLECTIVE_SIZES
    sizes, mode = options.links.buffer_sizes or usual, EXECUTION[options.device]
    for kind in KINDS:
        least = 4 * (1 if kind == "broadcast" else N)  # bytes: one float32 for each rank
        for size in (size for size in sizes if size < least):
            reason = f"{format_bytes(size)} is less than a float32 for each of {N} ranks; use a larger size"
            yield skipped(f"{size_id(options, N)}-{format_bytes(size)}-{kind}", reason)
        for nbytes in dict.fromkeys(size - size % least for size in sizes if size >= least):
            rounded = 0 <= largest_of_all(options.links) - nbytes < 4 * N
            for dtype in GPU_TYPES if on_gpu else GPU_TYPES[:1]:
                call = CollectiveSpec(world_size=N, nbytes=nbytes, kind=kind, dtype=dtype, execution=mode)
                yield case(call, core=most and rounded and dtype == "fp32", gate=most and on_gpu)


@on_several_ranks
def single_calls(options: Options, N: int) -> Iterator[Case]:
    """Yield measurement specs of the single calls of each collective, outside of the core suite."""
    for size in options.links.buffer_sizes or SINGLE_CALL_SIZES:
        call = SingleCallsSpec(world_size=N, nbytes=max(4 * N, size - size % (4 * N)))
        yield from (case(dataclasses.replace(call, kind=kind), core=False) for kind in (call.kind, *KINDS))


@pytest.mark.specs(cases=calls)
def test_all_reduce(measure: Measure, spec: AllReduceSpec) -> None:
    """How long does an all-reduce take, and which bandwidth does it reach?

    A copy and an all-reduce together have no bandwidth of the link.
    """
    call = measure(spec)
    if not spec.copies:
        call_metrics(measure, call, lambda t: all_reduce_busbw(spec.nbytes, t, spec.world_size))


@pytest.mark.specs(cases=collectives)
def test_collective(measure: Measure, spec: CollectiveSpec) -> None:
    """How long do reduce_scatter, all_gather, broadcast and all_to_all take?"""
    N = spec.world_size
    call_metrics(measure, measure(spec), lambda t: collective_busbw(spec.kind, spec.nbytes, t, N))


@pytest.mark.specs(cases=single_calls)
def test_single_calls(measure: Measure, spec: SingleCallsSpec) -> None:
    """How long do the slowest calls of a collective take, and which rank do they wait for?

    A note says if the times have two modes, and if one rank is late in most of the slowest calls.
    """
    call = measure(spec)
    for name in TAILS:
        measure.metric(name, {one.set: max(one.counters[name]) for one in call.samples})
    for one in call.samples:
        found = {name: values[0] for name, values in one.counters.items()}
        which = f"{format_bytes(spec.nbytes)} {spec.kind}, set {one.set}"
        if "slow_mode_seconds" in found:
            fast, slow = (units.seconds(found[f"{mode}_mode_seconds"]) for mode in ("fast", "slow"))
            part = found["slow_mode_fraction"]
            many, few = units.percent(1 - part), units.percent(part)
            measure.note(f"{which}: {many} of the calls take {fast}, {few} take {slow}")
        if found["late_fraction"] >= MOSTLY_LATE and found["late_seconds"] > found["call_p50_seconds"] / 4:
            late, waited = units.percent(found["late_fraction"]), units.seconds(found["late_seconds"])
            rank = int(found["late_rank"])
            measure.note(f"{which}: rank {rank} comes last in {late} of the slowest calls, by {waited}")


def call_metrics(measure: Measure, call: Measured, busbw_of: Callable[[float], float]) -> None:
    """Store the bandwidths of a collective call, and the part of its time outside its kernel.

    busbw_of: the function that returns the bus bandwidth, in bytes per second, for a time in
    seconds. The kernel's time is the shortest of all ranks, because the other ranks' kernels wait.
    """
    assert isinstance(call.spec, AllReduceSpec | CollectiveSpec)
    N, nbytes, seconds = call.spec.world_size, call.spec.nbytes, call.median_step_seconds()
    busbw = per_set(busbw_of, seconds)
    measure.metric("algbw_bytes_per_second", per_set(lambda t: algbw(nbytes, t), seconds))
    measure.metric("busbw_bytes_per_second", busbw)
    kind = call.spec.kind if isinstance(call.spec, CollectiveSpec) else call.spec.algorithm
    across = measure.machine.crosses_nodes(N)
    factor = crossing_factor(kind, N, measure.machine.links.node) if across else 1.0
    if factor is not None:
        link_utilization(measure, per_set(lambda rate: factor * rate, busbw), N)
    kernels = {one.set: min(one.counters.get("kernel_seconds", ()), default=0.0) for one in call.samples}
    if all(kernels.values()):
        measure.metric("framework_seconds", per_set(sub, seconds, kernels))


@pytest.mark.specs(cases=contests)
def test_fastest_all_reduce(measure: Measure, spec: AllReduceSpec) -> None:
    """Which all-reduce algorithm is the fastest for one buffer size?"""
    N, nbytes = spec.world_size, spec.nbytes
    alike = captured(N, nbytes) if spec.captured else own(N, nbytes, measure.machine.links)
    rivals = [call for call in alike if call != spec]
    possible = [call for call in rivals if not measure.machine.mapping_reason(call)]
    if not possible:
        pytest.skip(f"no other algorithm can run: {measure.machine.mapping_reason(rivals[0])}")
    others = {
        call.algorithm: measure.reference(call.algorithm, call).median_step_seconds() for call in possible
    }
    measured = measure(spec)  # last, because mapped memory may need new process sets
    backend = measured.median_step_seconds()
    best = min(others.values(), key=lambda seconds: median(seconds.values()))
    measure.metric("speedup_of_the_best_other", per_set(truediv, backend, best))
    for name, seconds in others.items():
        measure.metric(f"{name}_over_backend", per_set(truediv, seconds, backend))
    times = {spec.algorithm: backend, **others}
    for side, sets in sets_by_side(measured).items():
        of_side = {str(name): [seconds[one] for one in sets] for name, seconds in times.items()}
        found = the_fastest(of_side, USUAL_SPREAD[spec.execution])
        measure.note(f"{format_bytes(nbytes)} on {N} ranks{side}: {found}")


def the_fastest(seconds: Mapping[str, Sequence[float]], usual: float) -> str:
    """Return a sentence that names the fastest algorithm, or all algorithms that may be the fastest.

    `seconds[algorithm]` and `usual` are those of `ddpperf.analysis.statistics.fastest`.
    """
    *others, last = fastest(seconds, usual)
    if not others:
        return f"{last} is the fastest"
    return f"{', '.join(others)} or {last} is the fastest; their times are too close to tell which"


@pytest.mark.specs(cases=largest)
def test_backend_model(measure: Measure, spec: AllReduceSpec) -> None:
    """Which latency and bandwidth does NCCL's or gloo's all-reduce have?

    The model is checked by predicting the time of each buffer size from the other buffer sizes.
    """
    sizes = backend_sizes(measure.machine.device, measure.machine.links)
    smaller = [size for size in sizes if size < spec.nbytes]
    calls = [
        measure.reference(format_bytes(nbytes), dataclasses.replace(spec, nbytes=nbytes))
        for nbytes in smaller
    ]
    times = [call.median_step_seconds() for call in (*calls, measure(spec))]
    chosen = per_set(lambda *seconds: choose_lines([*smaller, spec.nbytes], seconds), *times)
    estimate_metric(measure, "latency_seconds", per_set(attrgetter("latency"), chosen))
    of_a_byte = all_reduce_busbw(1, 1, spec.world_size)
    busbw = per_set(lambda fit: fit.byte_seconds.inverse(of_a_byte), chosen)
    estimate_metric(measure, "asymptotic_busbw_bytes_per_second", busbw)
    if all(math.isfinite(estimate.value) for estimate in busbw.values()):
        link_utilization(measure, per_set(lambda estimate: estimate.value, busbw), spec.world_size)
    measure.metric("protocols", per_set(lambda fit: len(fit.lines), chosen))
    measure.metric("held_out_error", per_set(attrgetter("held_out_error"), chosen))


@pytest.mark.specs(cases=algorithms)
def test_cost_model(measure: Measure, spec: AllReduceSpec) -> None:
    """Do one latency and one link bandwidth predict the times of all all-reduce algorithms?

    On several nodes, the model has one link inside the nodes and one between them.
    """
    links, N = measure.machine.links, spec.world_size
    # On several nodes, the rings of single nodes show the link inside them.
    inside = [n for n in measure.machine.world_sizes if 1 < n <= links.node < N]
    measured = {
        call: measure.reference(call.id, call).median_step_seconds()
        for nbytes in own_sizes(links)
        for call in (
            *modelled(N, nbytes, links),
            *(AllReduceSpec(world_size=n, nbytes=nbytes, algorithm="ring") for n in inside),
        )
        if call != spec
    }
    measured[spec] = measure(spec).median_step_seconds()
    times = {name: {call: t[name] for call, t in measured.items()} for name in measured[spec]}
    with warn_if_undetermined(measure, "the cost model"):
        fitted = per_set(lambda times: choose_cost_model(times, links.node), times)
        models = per_set(itemgetter(0), fitted)
        if links.node >= N:
            one_link_metrics(measure, N, models)
        for place in ("inside", "between") if links.node < N else ():
            messages, nbytes = (unit_seconds(models, f"{unit} {place}") for unit in ("message", "byte"))
            if messages:  # one rank per node sends nothing inside a node
                estimate_metric(measure, f"{place}_message_seconds", messages)
                estimate_metric(measure, f"{place}_bytes_per_second", per_set(Estimate.inverse, nbytes))
        for call, t in measured.items():
            if (call.algorithm, call.world_size) == (spec.algorithm, N):
                predicted = per_set(lambda model, t, call=call: model.seconds(call) / t, models, t)
                measure.metric(f"predicted_over_measured_{format_bytes(call.nbytes)}", predicted)
        measure.metric("held_out_error", per_set(itemgetter(1), fitted))


def one_link_metrics(measure: Measure, world_size: int, models: Mapping[str, CostModel]) -> None:
    """Store the parameters of the model that is fitted on one node.

    If the interval of the link's bandwidth has no upper end, only its lower end is stored. This
    happens if launching the calls takes all of their time.
    """
    estimate_metric(measure, "latency_seconds", unit_seconds(models, "message inside"))
    links = per_set(Estimate.inverse, unit_seconds(models, "byte inside"))
    if all(math.isfinite(link.high) for link in links.values()):
        estimate_metric(measure, "link_bytes_per_second", links)
        link_utilization(measure, per_set(attrgetter("value"), links), world_size)
    else:
        measure.metric("link_bytes_per_second_low", per_set(attrgetter("low"), links))
    if adding := unit_seconds(models, "byte added"):
        estimate_metric(measure, "reduce_byte_seconds", adding)


def unit_seconds(models: Mapping[str, CostModel], unit: str) -> dict[str, Estimate]:
    """Return the seconds that each process set's cost model assigns to a unit, such as one message.

    Returns an empty dict if the model of a process set does not have this unit.
    """
    found = per_set(lambda model: model.unit_seconds.get(unit), models)
    return found if all(found.values()) else {}
