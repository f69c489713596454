"""Functions that choose all-reduce buffer sizes and algorithms, and compare the algorithms."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median

from ddpperf.analysis.library_cost_model import FEWEST_SIZES
from ddpperf.analysis.logarithmic_fit import Estimate, Undetermined
from ddpperf.analysis.statistics import not_longer
from ddpperf.machine.hardware import Links
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results import units
from ddpperf.results.samples import Measured
from ddpperf.specs import (
    CAPTURED_ALGORITHMS,
    LOW_LATENCY_BYTES,
    OWN_ALGORITHMS,
    Algorithm,
    AllReduceSpec,
    CallExecution,
)
from perf.common.by_set import per_set

SIZES = (2**10, 2**16, 2**20, 2**24, 2**26)
GPU_SIZES = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30)
OWN_SIZES = (2**12, 2**16, 2**20, 2**24)  # for the algorithms made of messages between ranks
RING_SIZE = 2**26  # of the algorithms in `own` only the ring is measured at this size or more
WHY_ABOVE = (  # why a bandwidth can exceed the rate of a link
    "the switch adds up the data (NVLS), the rate of the link is too low, or the time is too short"
)


def backend_sizes(device: str, links: Links) -> Sequence[int]:
    """Return the buffer sizes, in bytes, for the all-reduce of NCCL or gloo."""
    return links.buffer_sizes or (GPU_SIZES if device == "cuda" else SIZES)


def own_sizes(links: Links) -> Sequence[int]:
    """Return the buffer sizes, in bytes, for this project's own all-reduce algorithms."""
    return links.buffer_sizes or (*OWN_SIZES, RING_SIZE)


def too_few(sizes: Sequence[int]) -> str:
    return f"a model needs {FEWEST_SIZES} buffer sizes or more, got {len(sizes)}; name more in --buffer-sizes"


def largest_of_all(links: Links) -> int:
    """Return the largest buffer size, in bytes, at which all of this project's algorithms run.

    If only the ring algorithm has sizes, return the ring's largest size.
    """
    sizes = own_sizes(links)
    return max([nbytes for nbytes in sizes if nbytes < RING_SIZE] or sizes)


def execution(device: str) -> CallExecution:
    """Return the execution mode for comparing all-reduces: "graph" on GPUs, "eager" on a CPU.

    On GPUs the CPU's launches limit eager all-reduces.
    """
    return "graph" if device == "cuda" else "eager"


def captured(N: int, nbytes: int) -> list[AllReduceSpec]:
    """Return a measurement spec for each all-reduce algorithm that can run in a CUDA graph."""
    names: tuple[Algorithm, ...] = CAPTURED_ALGORITHMS
    if nbytes > LOW_LATENCY_BYTES:
        names = tuple(name for name in names if name != "low_latency")
    return [
        AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm, execution="graph")
        for algorithm in names
    ]


def own(N: int, nbytes: int) -> list[AllReduceSpec]:
    """Return a measurement spec for each of this project's own algorithms that treat ranks alike."""
    algorithms: tuple[Algorithm, ...] = OWN_ALGORITHMS if nbytes < RING_SIZE else ("ring",)
    return [AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm) for algorithm in algorithms]


def between_nodes(N: int, nbytes: int, links: Links) -> list[AllReduceSpec]:
    """Return the measurement spec of the hierarchical all-reduce if the ranks fill several nodes."""
    if not 1 < links.node < N or N % links.node:
        return []
    return [AllReduceSpec(world_size=N, nbytes=nbytes, algorithm="hierarchical", node_size=links.node)]


def modelled(N: int, nbytes: int, links: Links) -> list[AllReduceSpec]:
    """Return a measurement spec for each of this project's own algorithms that has a cost model.

    On several nodes, the cost model has two links, and the algorithms are the flat ring and the
    hierarchical all-reduce.
    """
    if links.node >= N:
        return own(N, nbytes)
    ring = AllReduceSpec(world_size=N, nbytes=nbytes, algorithm="ring")
    return [ring, *between_nodes(N, nbytes, links)]


def the_fastest(calls: Mapping[str, Measured]) -> str:
    """Return a sentence that names the fastest algorithm and the algorithms equally fast.

    An algorithm is as fast if its time lies within the error of the fastest algorithm's time.
    """
    fastest = min(calls, key=lambda name: median(calls[name].median_step_seconds().values()))
    alike = as_fast(calls, fastest)
    equal = f", and equal within the error: {', '.join(alike)}" if alike else ""
    return f"{fastest} is the fastest{equal}"


def as_fast(calls: Mapping[str, Measured], fastest: str) -> list[str]:
    """Return the algorithms whose median time is, within its error, that of the fastest algorithm.

    A median counts as equal within twice the standard error of the difference of the two medians.
    """
    times = {name: call.all_step_seconds() for name, call in calls.items()}
    least = times.pop(fastest)
    return [name for name, seconds in times.items() if not_longer(seconds, least)]


@contextlib.contextmanager
def warn_if_undetermined(measure: Measure, what: str) -> Iterator[None]:
    """Store a warning instead of raising if the measured all-reduces do not determine a cost model.

    A cost model needs all-reduces of several different sizes. what: the result that is missing
    without the model.
    """
    try:
        yield
    except Undetermined as error:
        measure.warn(f"{what} is missing: {error}")


def link_metric(measure: Measure, by_set: Mapping[str, Estimate]) -> bool:
    """Store the estimated link bandwidth and its interval; return whether the interval is finite.

    If the interval has no upper end, only its lower end is stored. This happens if launching the
    calls takes all of their time.
    """
    bounded = all(math.isfinite(link.high) for link in by_set.values())
    estimate_metric(measure, "link_bytes_per_second", by_set, ("", "_low", "_high") if bounded else ("_low",))
    return bounded


def link_utilization(measure: Measure, bandwidths: Mapping[str, float], world_size: int) -> None:
    """Store a bandwidth divided by the rate of the link between the devices, if this rate is known.

    bandwidths: bytes per second in one direction, by process set. A fraction above 1 is a warning.
    """
    if (link := measure.machine.link(world_size)) is None:
        return
    rate = link.bytes_per_second
    measure.metric("link_utilization", per_set(lambda bandwidth: bandwidth / rate, bandwidths))
    if measure.metrics["link_utilization"]["value"] > 1:
        measure.warn(f"bandwidth above the link's {units.bandwidth(rate)}: {WHY_ABOVE}")


def estimate_metric(
    measure: Measure, name: str, by_set: Mapping[str, Estimate], ends: Sequence[str] = ("", "_low", "_high")
) -> None:
    """Store an estimate and both ends of its interval as metrics.

    A value that is infinite in any process set is left out. by_set: the estimate of each process
    set.
    """
    for end in ends:
        values = per_set(attrgetter(end.lstrip("_") or "value"), by_set)
        if all(map(math.isfinite, values.values())):
            measure.metric(f"{name}{end}", values)
