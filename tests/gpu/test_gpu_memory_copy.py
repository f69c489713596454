"""Copies in ranks that have GPUs: within the memory of the GPU, and within that of the CPU."""

from __future__ import annotations

from statistics import median

from ddpperf.specs import CopySpec
from ddpperf.workers.pool import Pool


def test_copy_in_host_memory_takes_the_time_of_a_cpu(gpus: Pool) -> None:
    """64 MiB take a GPU of 2 TB/s 70 us, and a core of 20 GB/s 3 ms."""
    device = CopySpec(world_size=1, nbytes=2**26)
    host = CopySpec(world_size=1, nbytes=2**26, memory="host")
    on_gpu, on_cpu = (median(gpus.measure(spec).all_step_seconds()) for spec in (device, host))
    assert on_cpu > 5 * on_gpu
