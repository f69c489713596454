"""Communication hooks of DistributedDataParallel, which average gradient buckets over the ranks.

DDP checks the annotations of hooks, which must be types. Postponed annotations are strings, so this
module has none.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpperf.collectives.symmetric_memory import KERNEL_TYPES, one_shot, symmetric_buffer, two_shot
from ddpperf.errors import CannotTrain
from ddpperf.measuring.clock import delayed
from ddpperf.specs import TrainingSpec

BucketMessage = tuple[int, torch.dtype]  # number of elements and their data type
Future = torch.futures.Future[torch.Tensor]
SYMMETRIC_BYTES = 16 * 2**20  # for larger buckets NCCL's own algorithms are faster
ONE_SHOT_BYTES = 2**18  # up to this size every rank reads the whole buffers of all others


def register(model: DistributedDataParallel, spec: TrainingSpec, device: torch.device) -> None:
    """Register a training spec's communication hook with a DDP model.

    With comm_hook "none" DDP keeps its default, which divides the gradients and then sums them. Raises
    CannotTrain if the hook cannot send a parameter's gradient.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if spec.comm_hook in ("bf16", "fp16", "powersgd"):
        for name, parameter in model.module.named_parameters():
            if parameter.is_complex():
                what = f"the hook {spec.comm_hook} sends no imaginary parts, and {name} is complex"
                raise CannotTrain(f"{what}; use another hook")
    if spec.communication == "local" or spec.comm_delay_seconds:
        model.register_comm_hook(None, OwnAverage(spec, device).average)
    elif spec.comm_hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif spec.comm_hook == "symmetric_memory":
        model.register_comm_hook(None, SymmetricMemoryAverage(device).average)
    elif spec.comm_hook != "none":
        compress = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        model.register_comm_hook(None, compress.get(spec.comm_hook, average))


def average(state: object, bucket: dist.GradBucket) -> Future:
    """Average a gradient bucket over all ranks with NCCL's AVG, which needs no kernel to divide."""
    del state
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True)
    averaged: Future = work.get_future().then(lambda future: future.value()[0])
    return averaged


class OwnAverage:
    """DDP communication hook that averages gradients, and can skip or delay sending a bucket.

    The averages are those of the comm_hook "none", "avg", "bf16" or "fp16".
    messages: the number of elements and the data type of each bucket, in order. The buckets are
    those of the current step, or of the last step.
    """

    def __init__(self, spec: TrainingSpec, device: torch.device) -> None:
        self.sends = spec.communication == "on"
        self.operation = dist.ReduceOp.AVG if spec.comm_hook == "avg" else dist.ReduceOp.SUM
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(spec.comm_hook)
        self.device = device
        self.world_size = dist.get_world_size()
        self.messages: list[BucketMessage] = []
        late = spec.comm_delay_seconds if dist.get_rank() == spec.comm_delay_rank else 0.0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.wait = delayed(lambda: None, late, device)

    def average(self, state: object, bucket: dist.GradBucket) -> Future:
        del state
        if bucket.index() == 0:
            self.messages = []
        gradients: Tensor = bucket.buffer()
        message = gradients if self.dtype is None else gradients.to(self.dtype)
        if self.operation == dist.ReduceOp.SUM:
            message.div_(self.world_size)
        self.messages.append((message.numel(), message.dtype))
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        sending: torch.futures.Future[list[Tensor]]
        with torch.cuda.stream(self.stream):
            if bucket.is_last():
                self.wait()
            if self.sends:
                sending = dist.all_reduce(message, self.operation, async_op=True).get_future()
            else:
                sending = torch.futures.Future(devices=[self.device] if self.stream is not None else [])
                sending.set_result([message])
        averaged: Future = sending.then(lambda future: gradients.copy_(future.value()[0]))
        return averaged


class SymmetricMemoryAverage:
    """DDP communication hook that averages gradients in memory shared by all GPUs of a node.

    The hook works on its own CUDA stream. Buckets larger than SYMMETRIC_BYTES, and buckets with a
    data type that is not in KERNEL_TYPES, are averaged by NCCL. All ranks allocate the shared
    memory of a bucket together, in the bucket's first step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.world_size = dist.get_world_size()
        self.buffers: dict[tuple[int, int], Tensor] = {}  # by the bucket's number and size

    def average(self, state: object, bucket: dist.GradBucket) -> Future:
        gradients: Tensor = bucket.buffer()
        if gradients.nbytes > SYMMETRIC_BYTES or gradients.dtype not in KERNEL_TYPES:
            return average(state, bucket)
        key = bucket.index(), gradients.numel()
        if key not in self.buffers:
            self.buffers[key] = symmetric_buffer(gradients.numel(), gradients.dtype, self.device)
        shared = self.buffers[key]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            torch.mul(gradients, 1 / self.world_size, out=shared)
            gradients.copy_(one_shot(shared) if gradients.nbytes <= ONE_SHOT_BYTES else two_shot(shared))
            done: Future = torch.futures.Future(devices=[self.device])
            done.set_result(gradients)
        return done
