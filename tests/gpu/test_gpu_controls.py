"""What checks comparisons on GPUs: copies of GPU and CPU memory, and the delay of a launch-bound step."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from ddpperf.measuring.clock import delayed, seconds_of
from ddpperf.specs import CopySpec
from ddpperf.workers.pool import Pool


def test_copy_in_host_memory_takes_the_time_of_a_cpu(gpus: Pool) -> None:
    """64 MiB take a GPU of 2 TB/s 70 us, and a core of 20 GB/s 3 ms."""
    device = CopySpec(world_size=1, nbytes=2**26)
    host = CopySpec(world_size=1, nbytes=2**26, memory="host")
    on_gpu, on_cpu = (median(gpus.measure(spec).all_step_seconds()) for spec in (device, host))
    assert on_cpu > 5 * on_gpu


@pytest.mark.parametrize("small", [True, False])
def test_delay_shows_whether_the_gpu_or_the_cpu_is_slower(small: bool) -> None:
    """The GPU waits for the launches of small multiplications, and the CPU for large ones."""
    device = torch.device("cuda", 0)
    matrix = torch.ones((8, 8) if small else (8192, 8192), device=device)

    def step() -> None:
        for _ in range(500 if small else 1):
            torch.mm(matrix, matrix)

    usual = min(seconds_of(step, 4, device) for _ in range(9)) / 4
    slower = delayed(step, usual, device)
    assert min(seconds_of(slower, 4, device) for _ in range(9)) / 4 > 1.7 * usual
