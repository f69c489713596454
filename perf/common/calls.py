"""The all_reduces of several experiments: of which sizes, by which algorithms, and how they are laid beside each other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from ddpperf.analysis.cost_models import NotToldApart
from ddpperf.analysis.log_fit import Estimate
from ddpperf.analysis.protocols import FEWEST_SIZES
from ddpperf.analysis.statistics import median_and_error
from ddpperf.machine.links import Links
from ddpperf.plugin.measure import Measure
from ddpperf.results.samples import Measured
from ddpperf.specs import (
    CAPTURED_ALGORITHMS,
    LOW_LATENCY_BYTES,
    OWN_ALGORITHMS,
    Algorithm,
    AllReduceSpec,
    CallExecution,
)

SIZES = (2**10, 2**16, 2**20, 2**24, 2**26)
GPU_SIZES = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30)
OWN_SIZES = (2**12, 2**16, 2**20, 2**24)  # of algorithms on messages from rank to rank
RING_SIZE = 2**26  # from here on of the one that such buffers are for


def backend_sizes(device: str, links: Links) -> Sequence[int]:
    return links.buffer_sizes or (GPU_SIZES if device == "cuda" else SIZES)


def own_sizes(links: Links) -> Sequence[int]:
    return links.buffer_sizes or (*OWN_SIZES, RING_SIZE)


def too_few(sizes: Sequence[int]) -> str:
    return f"a model is chosen by {FEWEST_SIZES} sizes or more, got {len(sizes)}; name more in --buffer-sizes"


def largest_of_all(links: Links) -> int:
    """Of the sizes that all algorithms have; of those that only the ring has, if there are no others."""
    sizes = own_sizes(links)
    return max([nbytes for nbytes in sizes if nbytes < RING_SIZE] or sizes)


def execution(device: str) -> CallExecution:
    """How calls are laid beside each other: captured where they can be, for small eager ones are bound by launches."""
    return "graph" if device == "cuda" else "eager"


def captured(N: int, nbytes: int) -> list[AllReduceSpec]:
    names: tuple[Algorithm, ...] = CAPTURED_ALGORITHMS
    if nbytes > LOW_LATENCY_BYTES:
        names = tuple(name for name in names if name != "low_latency")
    return [
        AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm, execution="graph")
        for algorithm in names
    ]


def own(N: int, nbytes: int) -> list[AllReduceSpec]:
    algorithms: tuple[Algorithm, ...] = OWN_ALGORITHMS if nbytes < RING_SIZE else ("ring",)
    return [AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm) for algorithm in algorithms]


def the_fastest(calls: Mapping[str, Measured]) -> str:
    """Of one side's, by the median of its sets."""
    fastest = min(calls, key=lambda name: median(calls[name].median_step_seconds().values()))
    alike = as_fast(calls, fastest)
    return f"{fastest} is the fastest" + (f", and {', '.join(alike)} not told from it" if alike else "")


def as_fast(calls: Mapping[str, Measured], fastest: str) -> list[str]:
    """The others that cannot be told from the fastest: whose median is above its by no more than twice what both are off by."""
    times = {name: median_and_error(call.all_step_seconds()) for name, call in calls.items()}
    least, off = times.pop(fastest)
    return [name for name, (t, error) in times.items() if t - least <= 2 * math.hypot(error, off)]


@contextlib.contextmanager
def doubted_unless_told_apart(measure: Measure, what: str) -> Iterator[None]:
    """Where calls leave open what a model asks of them, as those of a few alike sizes do, the test passes without it.

    what: what is then not told.
    """
    try:
        yield
    except NotToldApart as error:
        measure.warn(f"{what} is not told: {error}")


def tell_link(measure: Measure, by_set: Mapping[str, Estimate]) -> bool:
    """The bandwidth in B/s, or only the lower end of its interval where that has no upper one, as where launches take all of
    the time; returns whether it has one."""
    bounded = all(math.isfinite(link.high) for link in by_set.values())
    estimated(measure, "link_bytes_per_second", by_set, ("", "_low", "_high") if bounded else ("_low",))
    return bounded


def estimated(
    measure: Measure,
    name: str,
    by_set: Mapping[str, Estimate],
    ends: Sequence[str] = ("", "_low", "_high"),
) -> None:
    """A fitted value and the ends of its interval; what has none in some set is left out."""
    for end in ends:
        values = {of_set: getattr(each, end.lstrip("_") or "value") for of_set, each in by_set.items()}
        if all(map(math.isfinite, values.values())):
            measure.metric(f"{name}{end}", values)
