"""One rank that times gloo's all-reduces; rank 0 prints {bytes: [seconds of each round]} as JSON.

`python all_reduce_rank.py RANK WORLD_SIZE ADDRESS ROUNDS BYTES...`. A round measures each size
after the other. Calls follow each other without a barrier, which would let ranks start unevenly.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

ENOUGH_SECONDS = 0.05  # of the calls that a time is the mean of


def main(rank: int, world_size: int, address: str, rounds: int, *sizes: int) -> None:
    """Form a process group, measure, and print."""
    torch.set_num_threads(1)
    with contextlib.suppress(PermissionError):  # other processes of the machine do not disturb
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    store = dist.TCPStore(address, 29500, world_size, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    calls = dict.fromkeys(sizes, 1)
    for turn in range(rounds + 2):
        for size in sizes:
            tensor = torch.zeros(size // 4)
            dist.all_reduce(tensor)
            start = perf_counter()
            for _ in range(calls[size]):
                dist.all_reduce(tensor)
            took = torch.tensor([(perf_counter() - start) / calls[size]], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn < 2:  # warm-up: TCP's windows grow
                calls[size] = max(1, round(ENOUGH_SECONDS / took.item()))
            else:
                seconds[size].append(took.item())
    if rank == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    first, second, where, *numbers = sys.argv[1:]
    main(int(first), int(second), where, *map(int, numbers))
