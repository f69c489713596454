"""The rates of links on real GPUs."""

from __future__ import annotations

import time

import pytest
import torch

from ddpperf.machine.gpu_description import nvlink, visible_gpus
from ddpperf.machine.links import PCIE_LANE_RATES, gpu_link

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NBYTES = 2**28
LEAST_USED = 0.4  # of the link's rate, by one copy; NVLink's packets alone take a fifth


def test_driver_describes_links_quickly() -> None:
    visible_gpus()
    began = time.perf_counter()
    gpus = visible_gpus()
    assert (time.perf_counter() - began) / len(gpus) < 0.5
    for gpu in gpus:
        print(gpu)
        assert gpu.pci_address
        assert gpu.pcie_generation in PCIE_LANE_RATES
        assert gpu.pcie_width in (1, 2, 4, 8, 16)
        assert sum(gpu.nvlink_ends.values()) == (gpu.nvlinks or 0)
        generation, rate = nvlink(gpu.name)
        if gpu.nvlinks and rate:
            assert gpu.nvlink_generation == generation
            assert gpu.nvlink_bytes_per_second == pytest.approx(gpu.nvlinks * rate, rel=0.01)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_copy_between_gpus_is_near_the_rate() -> None:
    link = gpu_link(visible_gpus()[:2])
    assert link is not None
    source, target = (torch.zeros(NBYTES, dtype=torch.uint8, device=f"cuda:{index}") for index in (0, 1))
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - began)
    used = NBYTES / min(seconds) / link.bytes_per_second
    print(f"{link}: {used:.0%}")
    assert LEAST_USED < used < 1
