"""How DistributedDataParallel's buckets of gradients are averaged over the ranks: its communication hooks.

DDP reads the hooks' annotations: they must be types, not the strings that postponed annotations are.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpperf.specs import CommHook

SYMMETRIC_BYTES = 16 * 2**20  # above, NCCL's own algorithms are faster
ONE_SHOT_BYTES = 2**18  # up to here each rank reads all others' buffers; above, its share of them


def register(model: DistributedDataParallel, hook: CommHook, device: torch.device) -> None:
    """Have `model` average its gradients by `hook`; "none" is DDP's own way: divide, then sum."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "avg":
        model.register_comm_hook(None, average)
    elif hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "symmetric_memory":
        model.register_comm_hook(None, SymmetricMemoryAverage(device).average)


def average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The backend's own average: no kernel of its own divides."""
    del state
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged


class SymmetricMemoryAverage:
    """Buckets of up to SYMMETRIC_BYTES are averaged in memory that all GPUs of the node have mapped, on a stream of their own.

    The buffers are made at a bucket's first step, all ranks together, and live as long as this does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self.world_size = dist.get_world_size()
        self.buffers: dict[tuple[int, int], Tensor] = {}

    def average(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients: Tensor = bucket.buffer()
        if gradients.nbytes > SYMMETRIC_BYTES:
            return average(state, bucket)
        shared = self._buffer(bucket.index(), gradients)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            torch.mul(gradients, 1 / self.world_size, out=shared)
            if gradients.nbytes <= ONE_SHOT_BYTES:
                gradients.copy_(torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self.group))
            else:
                gradients.copy_(torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self.group))
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self.device])
            done.set_result(gradients)
        return done

    def _buffer(self, index: int, gradients: Tensor) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric_memory  # only here: a build for the CPU may lack it

        key = index, gradients.numel()
        if key not in self.buffers:
            buffer = symmetric_memory.empty(gradients.numel(), dtype=gradients.dtype, device=self.device)
            symmetric_memory.rendezvous(buffer, self.group)
            self.buffers[key] = buffer
        return self.buffers[key]
