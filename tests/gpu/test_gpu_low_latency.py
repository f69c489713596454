"""The low-latency all-reduce on all GPUs, in one phase and in two, with both sizes of thread blocks."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

PHASES = (1, 2)
BLOCKS = (128, 512)
COUNTS = (1, 3, 1001, 2**16, 2**20 + 3)  # elements
CALLS = 7
MOST_SECONDS = 300


def sum_all(rank: int, N: int, folder: str) -> None:
    """Be one rank: sum buffers of all lengths in all ways, first eagerly, then in a CUDA graph."""
    from ddpperf.collectives import low_latency

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=N, device_id=device
    )
    torch.cuda.set_stream(torch.cuda.Stream(device))
    for phases, block, count, in_place in itertools.product(PHASES, BLOCKS, COUNTS, (True, False)):
        vars(low_latency)["choose"] = lambda count, N, chosen=(phases, block): chosen
        source = torch.zeros(count, device=device)
        result = source if in_place else torch.zeros(count, device=device)
        call = low_latency.LowLatency(source, result)
        graph = torch.cuda.CUDAGraph()
        for number in range(2 * CALLS):
            values = values_of(number, N, count)
            source.copy_(values[rank])
            if number < CALLS:
                call.sum()
            elif number == CALLS:
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
                    call.sum()
            if number >= CALLS:
                graph.replay()
            check(result, values, f"{phases=}, {block=}, {count=}, {in_place=}, call {number}")
        del graph
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"done{rank}").touch()


def values_of(number: int, N: int, count: int) -> torch.Tensor:
    """Return a row of values for each rank. One value has the bits that mean "not arrived"."""
    values = torch.randn(N, count, generator=torch.Generator().manual_seed(number))
    values[number % N, 0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    return values


def check(result: torch.Tensor, values: torch.Tensor, what: str) -> None:
    """Raise AssertionError unless the sum is right, and equal on all ranks."""
    expected = values.double().sum(0)
    torch.testing.assert_close(
        result.cpu().double(),
        expected,
        rtol=1e-5,
        atol=1e-5,
        equal_nan=True,
        msg=lambda why: f"{what}: {why}",
    )
    bits = result.view(torch.int32)
    of_ranks = [torch.empty_like(bits) for _ in values]
    dist.all_gather(of_ranks, bits)
    assert all(torch.equal(bits[1:], other[1:]) for other in of_ranks), what


@pytest.mark.slow
def test_all_lengths_are_summed(tmp_path: Path) -> None:
    """Use new values in each call, so that a value from an earlier call changes the sum."""
    N = torch.cuda.device_count()
    processes = torch.multiprocessing.spawn(sum_all, args=(N, str(tmp_path)), nprocs=N, join=False)
    end = time.monotonic() + MOST_SECONDS
    while not processes.join(timeout=1):
        if time.monotonic() > end:
            for process in processes.processes:
                process.kill()
            pytest.fail(f"the ranks wait for each other, or take more than {MOST_SECONDS} s")
    assert len(list(tmp_path.glob("done*"))) == N
