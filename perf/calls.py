"""The all_reduces of several experiments: of which sizes, by which algorithms, and how they are laid beside each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ddpperf.analysis.cost_models import NotToldApart
from ddpperf.analysis.protocols import FEWEST_SIZES
from ddpperf.plugin.link_options import Links
from ddpperf.plugin.measure import Measure
from ddpperf.specs import CAPTURED_ALGORITHMS, LOW_LATENCY_BYTES, OWN_ALGORITHMS, Algorithm, AllReduceSpec, CallForm

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


def form(device: str) -> CallForm:
    """How calls are laid beside each other: captured where they can be, for small eager ones are bound by launches."""
    return "graph" if device == "cuda" else "eager"


def captured(N: int, nbytes: int) -> list[AllReduceSpec]:
    names: tuple[Algorithm, ...] = CAPTURED_ALGORITHMS
    if nbytes > LOW_LATENCY_BYTES:
        names = tuple(name for name in names if name != "low_latency")
    return [AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm, form="graph") for algorithm in names]


def own(N: int, nbytes: int) -> list[AllReduceSpec]:
    algorithms: tuple[Algorithm, ...] = OWN_ALGORITHMS if nbytes < RING_SIZE else ("ring",)
    return [AllReduceSpec(world_size=N, nbytes=nbytes, algorithm=algorithm) for algorithm in algorithms]


@contextlib.contextmanager
def doubted_unless_told_apart(measure: Measure, what: str) -> Iterator[None]:
    """Where calls leave open what a model asks of them, as those of a few alike sizes do, the test passes without it.

    what: what is then not told.
    """
    try:
        yield
    except NotToldApart as error:
        measure.doubt(f"{what} is not told: {error}")
