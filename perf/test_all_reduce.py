"""All-reduce: how fast does the backend sum a buffer over all ranks, and how much of the link does it use?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpperf.analysis.bandwidth import algbw, all_reduce_busbw
from ddpperf.plugin.measure import Measure
from ddpperf.plugin.options import Options
from ddpperf.specs import AllReduceSpec
from perf import gate

SIZES = (2**10, 2**16, 2**20, 2**24, 2**26)
GPU_SIZES = (*SIZES, 2**28, 2**30)


def backend(options: Options) -> Iterator[AllReduceSpec]:
    for world_size in options.world_sizes:
        for nbytes in GPU_SIZES if options.device == "cuda" else SIZES:
            if world_size > 1:
                yield AllReduceSpec(world_size=world_size, nbytes=nbytes)


@pytest.mark.specs(cells=backend, gate=gate.large_all_reduce)
def test_all_reduce(measure: Measure, spec: AllReduceSpec) -> None:
    seconds = measure(spec).median_step_seconds()
    measure.metric("algbw_bytes_per_second", "B/s", {name: algbw(spec.nbytes, t) for name, t in seconds.items()})
    busbw = {name: all_reduce_busbw(spec.nbytes, t, spec.world_size) for name, t in seconds.items()}
    measure.metric("busbw_bytes_per_second", "B/s", busbw)
