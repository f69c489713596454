"""The all-reduce calls that several experiments share: sizes, algorithms, and comparisons."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from ddpperf.analysis.backend_protocols import FEWEST_SIZES
from ddpperf.analysis.cost_models import Undetermined
from ddpperf.analysis.logarithmic_fit import Estimate
from ddpperf.analysis.statistics import median_and_error
from ddpperf.machine.links import Links
from ddpperf.plugin.measure_fixture import Measure
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
OWN_SIZES = (2**12, 2**16, 2**20, 2**24)  # for the algorithms made of messages between ranks
RING_SIZE = 2**26  # from this size on only the ring is measured, which is for large buffers


def backend_sizes(device: str, links: Links) -> Sequence[int]:
    """Return the buffer sizes of the backend's own all-reduce, in bytes."""
    return links.buffer_sizes or (GPU_SIZES if device == "cuda" else SIZES)


def own_sizes(links: Links) -> Sequence[int]:
    """Return the buffer sizes of this project's algorithms, in bytes."""
    return links.buffer_sizes or (*OWN_SIZES, RING_SIZE)


def too_few(sizes: Sequence[int]) -> str:
    return f"a model needs {FEWEST_SIZES} buffer sizes or more, got {len(sizes)}; name more in --buffer-sizes"


def largest_of_all(links: Links) -> int:
    """Return the largest size that all algorithms have, or the ring's largest if there is none."""
    sizes = own_sizes(links)
    return max([nbytes for nbytes in sizes if nbytes < RING_SIZE] or sizes)


def execution(device: str) -> CallExecution:
    """Return how calls are compared: in a CUDA graph on GPUs, where launches bind eager ones."""
    return "graph" if device == "cuda" else "eager"


def captured(N: int, nbytes: int) -> list[AllReduceSpec]:
    """Return the calls that a CUDA graph can capture."""
    names: tuple[Algorithm, ...] = CAPTURED_ALGORITHMS
    if nbytes > LOW_LATENCY_BYTES:
        names = tuple(name for name in names if name != "low_latency")
    return [
        AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm, execution="graph")
        for algorithm in names
    ]


def own(N: int, nbytes: int) -> list[AllReduceSpec]:
    """Return the calls of this project's algorithms."""
    algorithms: tuple[Algorithm, ...] = OWN_ALGORITHMS if nbytes < RING_SIZE else ("ring",)
    return [AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm) for algorithm in algorithms]


def the_fastest(calls: Mapping[str, Measured]) -> str:
    """Name the fastest of these algorithms, and those that cannot be told from it."""
    fastest = min(calls, key=lambda name: median(calls[name].median_step_seconds().values()))
    alike = as_fast(calls, fastest)
    return f"{fastest} is the fastest" + (f", {', '.join(alike)} within its error" if alike else "")


def as_fast(calls: Mapping[str, Measured], fastest: str) -> list[str]:
    """Return the algorithms whose median is within twice the standard error of the fastest one's."""
    times = {name: median_and_error(call.all_step_seconds()) for name, call in calls.items()}
    least, least_error = times.pop(fastest)
    return [name for name, (t, error) in times.items() if t - least <= 2 * math.hypot(error, least_error)]


@contextlib.contextmanager
def warn_if_undetermined(measure: Measure, what: str) -> Iterator[None]:
    """Warn, and go on, if the measured calls do not determine a model's parameters.

    Calls of a few similar sizes do not. what: the result that is then missing.
    """
    try:
        yield
    except Undetermined as error:
        measure.warn(f"{what} is missing: {error}")


def link_metric(measure: Measure, by_set: Mapping[str, Estimate]) -> bool:
    """Store the link's bandwidth and interval; return whether the interval has an upper end.

    Without an upper end, as where launches take all of the time, only the lower end is stored.
    """
    bounded = all(math.isfinite(link.high) for link in by_set.values())
    estimate_metric(measure, "link_bytes_per_second", by_set, ("", "_low", "_high") if bounded else ("_low",))
    return bounded


def estimate_metric(
    measure: Measure, name: str, by_set: Mapping[str, Estimate], ends: Sequence[str] = ("", "_low", "_high")
) -> None:
    """Store an estimate and the ends of its interval, but no value that is infinite in some set."""
    for end in ends:
        values = {
            set_name: getattr(estimate, end.lstrip("_") or "value") for set_name, estimate in by_set.items()
        }
        if all(map(math.isfinite, values.values())):
            measure.metric(f"{name}{end}", values)
