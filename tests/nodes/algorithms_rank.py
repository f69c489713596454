"""One rank that times a ring, the hierarchical all-reduce and gloo's on the same buffers.

`python algorithms_rank.py RANK WORLD_SIZE NODE_SIZE ADDRESS ROUNDS BYTES...`. A round times each
algorithm once for each size. Rank 0 prints [[algorithm, bytes, [seconds of each round]], ...] as
JSON. Raises ArithmeticError if a sum is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from ddpperf.collectives.algorithms import Transport, hierarchical, ring

WARM_UP_ROUNDS = 2  # TCP's windows grow


def main(rank: int, world_size: int, node_size: int, address: str, rounds: int, *sizes: int) -> None:
    """Form a process group, measure, and print."""
    torch.set_num_threads(1)
    store = dist.TCPStore(address, 29500, world_size, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    transport = Transport()
    calls: dict[str, Callable[[Tensor], object]] = {
        "ring": lambda buffer: ring(buffer, transport),
        "hierarchical": lambda buffer: hierarchical(buffer, transport, node_size=node_size),
        "backend": dist.all_reduce,
    }
    seconds: dict[tuple[str, int], list[float]] = {(name, size): [] for size in sizes for name in calls}
    for turn in range(WARM_UP_ROUNDS + rounds):
        for name, size in seconds:
            buffer = torch.full((size // 4,), rank + 1.0)
            dist.barrier()
            start = perf_counter()
            calls[name](buffer)
            took = torch.tensor([perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if not bool((buffer == world_size * (world_size + 1) / 2).all()):
                raise ArithmeticError(f"{name} of {size} bytes gave a wrong sum on rank {rank}")
            if turn >= WARM_UP_ROUNDS:
                seconds[name, size].append(took.item())
    if rank == 0:
        print(json.dumps([[*call, times] for call, times in seconds.items()]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    first, second, third, where, *numbers = sys.argv[1:]
    main(int(first), int(second), int(third), where, *map(int, numbers))
