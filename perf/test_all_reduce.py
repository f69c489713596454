"""All-reduce: how fast is a buffer summed over all ranks, by which algorithm, and what does a model make of it?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from statistics import median

import pytest

from ddpperf.analysis.bandwidth import algbw, all_reduce_busbw, collective_busbw
from ddpperf.analysis.cost_models import FORMS, ChosenLinks, choose_links
from ddpperf.analysis.cost_models import Case as Call
from ddpperf.analysis.protocols import FEWEST_SIZES, choose_envelope
from ddpperf.plugin.cases import Case, size_id, skipped
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options.options import Options
from ddpperf.results.samples import BASE, CANDIDATE, Measured
from ddpperf.specs import AllReduceSpec, CollectiveKind, CollectiveSpec, format_bytes
from perf.common import gate
from perf.common.calls import (
    backend_sizes,
    captured,
    doubted_unless_told_apart,
    estimated,
    execution,
    largest_of_all,
    own,
    own_sizes,
    tell_link,
    the_fastest,
    too_few,
)

ONE_RANK = "an all_reduce needs two ranks or more; pass --world-sizes 1,2"
COLLECTIVE_SIZES, GPU_COLLECTIVE_SIZES = (2**24,), (2**20, 2**24, 2**28)
SIDES = {BASE: "base", CANDIDATE: "candidate"}
KINDS: tuple[CollectiveKind, ...] = ("reduce_scatter", "all_gather", "broadcast", "all_to_all")


def groups(options: Options) -> list[int]:
    """The most ranks first: after a smaller group had its memory mapped, a larger one needs fresh sets."""
    return [world_size for world_size in reversed(options.world_sizes) if world_size > 1]


def calls(options: Options) -> Iterator[Case]:
    for N in groups(options):
        for nbytes in backend_sizes(options.device, options.links):
            yield AllReduceSpec(world_size=N, nbytes=nbytes)
            if options.device == "cuda":
                yield from captured(N, nbytes)
        for nbytes in own_sizes(options.links):
            yield from own(N, nbytes)
        yield from out_of_place(options, N)
    if not groups(options):
        yield skipped(size_id(options.device, 1), ONE_RANK)


def out_of_place(options: Options, N: int) -> Iterator[AllReduceSpec]:
    """The backend's of a large buffer; on GPUs all of that, and what is captured of the smallest; some need no copy."""
    nbytes = largest_of_all(options.links)
    calls = [AllReduceSpec(world_size=N, nbytes=nbytes)]
    if options.device == "cuda":
        sizes = dict.fromkeys((min(backend_sizes(options.device, options.links)), nbytes))
        calls = [*own(N, nbytes), *(each for size in sizes for each in captured(N, size))]
    yield from (dataclasses.replace(each, in_place=False) for each in calls)


def largest(options: Options) -> Iterator[Case]:
    """The greatest of the backend's, by number of ranks."""
    sizes = backend_sizes(options.device, options.links)
    for N in groups(options):
        if len(sizes) < FEWEST_SIZES:
            yield skipped(size_id(options.device, N), too_few(sizes))
        else:
            yield AllReduceSpec(world_size=N, nbytes=max(sizes), execution=execution(options.device))


def contests(options: Options) -> Iterator[AllReduceSpec]:
    """The backend's, where something else was measured, too."""
    for N in groups(options):
        for nbytes in backend_sizes(options.device, options.links):
            if options.device == "cuda" or nbytes in own_sizes(options.links):
                yield AllReduceSpec(world_size=N, nbytes=nbytes, execution=execution(options.device))


def algorithms(options: Options) -> Iterator[Case]:
    """Each by its greatest buffer of those that all have."""
    sizes = own_sizes(options.links)
    for N in groups(options):
        if len(sizes) < FEWEST_SIZES:
            yield skipped(size_id(options.device, N), too_few(sizes))
        else:
            yield from own(N, largest_of_all(options.links))


def collectives(options: Options) -> Iterator[Case]:
    usual = GPU_COLLECTIVE_SIZES if options.device == "cuda" else COLLECTIVE_SIZES
    for N in groups(options):
        for kind in KINDS:
            share = 4 * (
                1 if kind == "broadcast" else N
            )  # bytes of an element for each rank, of which all have as many
            sizes = options.links.buffer_sizes or usual
            for size in (each for each in sizes if each < share):
                reason = (
                    f"{format_bytes(size)} is less than a float32 for each of {N} ranks; name a larger size"
                )
                yield skipped(f"{size_id(options.device, N)}-{format_bytes(size)}-{kind}", reason)
            for nbytes in dict.fromkeys(size - size % share for size in sizes if size >= share):
                yield CollectiveSpec(
                    world_size=N, nbytes=nbytes, kind=kind, execution=execution(options.device)
                )


@pytest.mark.specs(cases=calls, gate=gate.large_all_reduce)
def test_all_reduce(measure: Measure, spec: AllReduceSpec) -> None:
    call = measure(spec)
    seconds = call.median_step_seconds()
    measure.metric("algbw_bytes_per_second", {name: algbw(spec.nbytes, t) for name, t in seconds.items()})
    bandwidths(
        measure, {name: all_reduce_busbw(spec.nbytes, t, spec.world_size) for name, t in seconds.items()}
    )
    beside_kernels(measure, call)


@pytest.mark.specs(cases=collectives)
def test_collective(measure: Measure, spec: CollectiveSpec) -> None:
    """What FSDP and ZeRO rest on."""
    call = measure(spec)
    seconds = call.median_step_seconds()
    measure.metric("algbw_bytes_per_second", {name: algbw(spec.nbytes, t) for name, t in seconds.items()})
    busbw = {
        name: collective_busbw(spec.kind, spec.nbytes, t, spec.world_size) for name, t in seconds.items()
    }
    bandwidths(measure, busbw)
    beside_kernels(measure, call)


def bandwidths(measure: Measure, busbw: Mapping[str, float]) -> None:
    measure.metric("busbw_bytes_per_second", busbw)
    if link := measure.machine.link_bytes_per_second:
        measure.metric("link_utilization", {name: each / link for name, each in busbw.items()})


def beside_kernels(measure: Measure, call: Measured) -> None:
    """What a call costs besides the library's own kernel, on the rank whose kernel waits the least for others."""
    kernels = {
        sample.set: min(sample.counters.get("kernel_seconds", ()), default=0.0) for sample in call.samples
    }
    if all(kernels.values()):
        beside = {name: t - kernels[name] for name, t in call.median_step_seconds().items()}
        measure.metric("framework_seconds", beside)


@pytest.mark.specs(cases=contests)
def test_fastest_all_reduce(measure: Measure, spec: AllReduceSpec) -> None:
    """Of all algorithms that were measured on so many bytes."""
    N = spec.world_size
    beside = [each for each in (captured if spec.captured else own)(N, spec.nbytes) if each != spec]
    possible = [each for each in beside if not measure.machine.mapping_reason(each)]
    if not possible:
        pytest.skip(f"nothing else is measured: {measure.machine.mapping_reason(beside[0])}")
    calls: dict[str, Measured] = {
        each.algorithm: measure.reference(each.algorithm, each) for each in possible
    }
    calls[spec.algorithm] = measure(spec)  # last, for what is mapped may need fresh sets
    by_set = {name: call.median_step_seconds() for name, call in calls.items()}
    others = [name for name in by_set if name != spec.algorithm]
    best = min(others, key=lambda name: median(by_set[name].values()))
    ratio = {name: t / by_set[best][name] for name, t in by_set[spec.algorithm].items()}
    measure.metric("speedup_of_the_best_other", ratio)
    for name in others:
        over = {set_name: t / by_set[spec.algorithm][set_name] for set_name, t in by_set[name].items()}
        measure.metric(f"{name}_over_backend", over)
    sides = list(dict.fromkeys(sample.side for sample in calls[spec.algorithm].samples))
    for side in sides:
        of = f", {SIDES[side]}" if len(sides) > 1 else ""
        told = the_fastest({name: call.of(side) for name, call in calls.items()})
        measure.note(f"{format_bytes(spec.nbytes)} on {N} ranks{of}: {told}")


@pytest.mark.specs(cases=largest)
def test_backend_model(measure: Measure, spec: AllReduceSpec) -> None:
    """The backend's seconds over sizes, as lines: their starts, their bandwidths, and how well sizes left out are predicted."""
    sizes = backend_sizes(measure.machine.device, measure.machine.links)
    references = {
        each: measure.reference(format_bytes(each), dataclasses.replace(spec, nbytes=each))
        for each in sizes
        if each < spec.nbytes
    }
    measured = {nbytes: reference.median_step_seconds() for nbytes, reference in references.items()}
    measured[spec.nbytes] = measure(spec).median_step_seconds()
    chosen = {
        name: choose_envelope(list(measured), [t[name] for t in measured.values()])
        for name in measured[spec.nbytes]
    }
    estimated(measure, "latency_seconds", {name: each.latency for name, each in chosen.items()})
    of_a_byte = all_reduce_busbw(1, 1, spec.world_size)
    busbw = {name: each.byte_seconds.inverse(of_a_byte) for name, each in chosen.items()}
    estimated(measure, "asymptotic_busbw_bytes_per_second", busbw)
    measure.metric("protocols", {name: len(each.envelope.lines) for name, each in chosen.items()})
    measure.metric("held_out_error", {name: each.held_out_error for name, each in chosen.items()})


@pytest.mark.specs(cases=algorithms)
def test_cost_model(measure: Measure, spec: AllReduceSpec) -> None:
    """One latency and one bandwidth for the messages of all algorithms, and what these make of this one's calls."""
    measured = {
        each: measure.reference(each.id, each).median_step_seconds()
        for nbytes in own_sizes(measure.machine.links)
        for each in own(spec.world_size, nbytes)
        if each != spec
    }
    measured[spec] = measure(spec).median_step_seconds()
    with doubted_unless_told_apart(measure, "a model"):
        fitted = {
            name: choose_links(
                [
                    Call(algorithm=each.algorithm, N=each.world_size, nbytes=each.nbytes, seconds=t[name])
                    for each, t in measured.items()
                ]
            )
            for name in measured[spec]
        }
        tell_model(measure, spec, measured, fitted)


def tell_model(
    measure: Measure,
    spec: AllReduceSpec,
    measured: Mapping[AllReduceSpec, Mapping[str, float]],
    fitted: Mapping[str, ChosenLinks],
) -> None:
    """What is fitted, by set, and the seconds of the spec's algorithm by it and by reports' formulas, over those measured."""
    estimated(measure, "latency_seconds", {name: each.model.latency for name, each in fitted.items()})
    links = {name: each.model.bandwidth for name, each in fitted.items()}
    bounded = tell_link(measure, links)
    adding = {
        name: each.model.reduce_seconds
        for name, each in fitted.items()
        if each.model.reduce_seconds is not None
    }
    if len(adding) == len(fitted):  # told apart from sending in all of them
        estimated(measure, "reduce_byte_seconds", adding)
    link = measure.machine.link_bytes_per_second
    used = (
        {name: each.value for name, each in links.items()}
        if bounded
        else dict.fromkeys(links, link)
        if link
        else {}
    )
    for report in FORMS if used else ():
        written = {
            name: report.seconds(spec.world_size, spec.nbytes, B) / measured[spec][name]
            for name, B in used.items()
        }
        measure.metric(f"{report.name}_over_measured", written)
        measure.note(f"{report.formula}: {report.describes}")
    for each, t in measured.items():
        if each.algorithm == spec.algorithm:
            predicted = {
                name: chosen.model.seconds(each.algorithm, each.world_size, each.nbytes) / t[name]
                for name, chosen in fitted.items()
            }
            measure.metric(f"predicted_over_measured_{format_bytes(each.nbytes)}", predicted)
    measure.metric("held_out_error", {name: each.held_out_error for name, each in fitted.items()})
