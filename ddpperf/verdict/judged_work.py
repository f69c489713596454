"""Measurements that vary too much to be judged by their time."""

from __future__ import annotations

from statistics import median

from ddpperf.results.samples import Measured
from ddpperf.specs import AllReduceSpec, MessagesSpec, SamplerSpec, Spec
from ddpperf.specs.collective import CAPTURED_ALGORITHMS, Call

# A step is launch bound if the ratio of its time to its GPU time is above this: the GPU waits for
# the CPU. The step's time then varies from run to run, so CPU seconds are compared instead. A step
# that is captured in a CUDA graph needs no launches, so its time is compared.
LAUNCH_BOUND = 1.05
SMALL_BYTES = 2**24  # a call of fewer bytes is bound by kernel launches on a GPU, by the scheduler on a CPU


def is_launch_bound(measured: Measured) -> bool:
    """Return whether the GPU waited for kernel launches in the median process set.

    Returns False without device times.
    """
    by_set = measured.launch_bound()
    return bool(by_set) and median(by_set.values()) > LAUNCH_BOUND


def is_informational(spec: Spec, device: str) -> bool:
    """Return whether the time of what a spec measures varies too much on this device to fail a run.

    On a CPU these are collectives of less than 16 MiB. On a GPU these are small all_reduces outside
    CUDA graphs. On both these are the listing of shards, whose microseconds vary by half, and steps
    whose messages are counted, which are timed only once.
    """
    if isinstance(spec, MessagesSpec | SamplerSpec):
        return True
    if device == "cuda":
        if not isinstance(spec, AllReduceSpec) or spec.captured:
            return False
        return spec.nbytes < SMALL_BYTES or spec.algorithm not in CAPTURED_ALGORITHMS
    return isinstance(spec, Call) and spec.nbytes < SMALL_BYTES
