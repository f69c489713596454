"""Buffer sizes of all-reduces, and how estimates and the use of a link are stored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from ddpperf.analysis.cost_models import FEWEST_SIZES, Undetermined
from ddpperf.analysis.statistics import Estimate
from ddpperf.machine.hardware import Links
from ddpperf.plugin.measure_fixture import Measure
from ddpperf.results import units
from perf.common.by_set import per_set

SIZES = (2**10, 2**16, 2**20, 2**24, 2**26)
GPU_SIZES = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30)
WHY_ABOVE = (  # why a bandwidth can exceed the rate of a link
    "the switch adds up the data (NVLS), the rate assumed for the link is too low, or the time is wrong"
)


def backend_sizes(device: str, links: Links) -> Sequence[int]:
    """Return the buffer sizes, in bytes, for the all-reduce of NCCL or gloo."""
    return links.buffer_sizes or (GPU_SIZES if device == "cuda" else SIZES)


def too_few(sizes: Sequence[int]) -> str:
    return f"a model needs {FEWEST_SIZES} buffer sizes or more, got {len(sizes)}; name more in --buffer-sizes"


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


def estimate_metric(measure: Measure, name: str, by_set: Mapping[str, Estimate]) -> None:
    """Store an estimate and both ends of its interval as metrics.

    A value that is infinite in any process set is left out. by_set: the estimate of each process
    set.
    """
    for end in ("", "_low", "_high"):
        values = per_set(attrgetter(end.lstrip("_") or "value"), by_set)
        if all(map(math.isfinite, values.values())):
            measure.metric(f"{name}{end}", values)
