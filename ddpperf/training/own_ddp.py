"""A minimal DistributedDataParallel that sums gradient buckets during the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.collectives.symmetric_memory import KERNEL_TYPES, CopyEngines, symmetric_buffer, two_shot
from ddpperf.errors import CannotTrain
from ddpperf.specs import TrainingSpec

MOST_BYTES = 25 * 2**20  # the largest bucket, as in torch's DDP
LEAST_BYTES = 2**19
TWO_SHOT_BYTES = 2**21  # up to this size a kernel delays the backward pass by less than copy engines take
ALIGNED_BYTES = 16  # a kernel's widest read, which needs an aligned address


class OwnDDP(nn.Module):
    """Wrapper of a model that sums the model's gradients over all ranks in each backward pass.

    Each rank must weigh its loss by its fraction of the global batch. All ranks begin with rank 0's
    parameters and buffers. Afterwards the buffers differ between ranks. The first backward pass
    ends by making the buckets, in the order of rank 0's gradients. While `synchronizes` is False
    gradients add up on each rank. The next step raises CannotTrain if a parameter got no gradient. If
    that happens on some ranks only, the other ranks wait for them. A backward pass raises CannotTrain
    if a parameter gets two gradients.
    """

    def __init__(self, module: nn.Module, spec: TrainingSpec, device: torch.device) -> None:
        super().__init__()
        self.module, self.spec, self.device = module, spec, device
        self.synchronizes = True
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        named = module.named_parameters()
        self.trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        self.arrived: dict[nn.Parameter, None] = {}  # parameters with a gradient in this backward pass
        self.sent = 0  # buckets sent in this backward pass
        self.task = -1  # torch's number of the backward pass whose end calls `_finish`
        for state in module.state_dict().values():
            dist.broadcast(state, 0)
        me = weakref.ref(self)  # torch never frees a hook that refers to its own parameter

        def arrive(parameter: nn.Parameter) -> None:
            if (model := me()) is not None:
                model._arrive(parameter)

        for parameter in self.trained.values():
            parameter.register_post_accumulate_grad_hook(arrive)

    def forward(self, *inputs: Any) -> Any:
        if self.arrived:
            missing = next(name for name, parameter in self.trained.items() if parameter not in self.arrived)
            what = f"own_ddp needs a gradient of each parameter in each step, got none of {missing}"
            raise CannotTrain(f"{what}; use all in each step, or set their requires_grad to False")
        return self.module(*inputs)

    def _arrive(self, parameter: nn.Parameter) -> None:
        if not self.synchronizes:
            return
        # A reentrant checkpoint runs a backward pass within a backward pass. Each has its own end.
        if self.task != (task := torch._C._current_graph_task_id()):
            self.task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if parameter in self.arrived:  # its bucket may be on its way
            name = next(name for name, trained in self.trained.items() if trained is parameter)
            what = f"own_ddp needs one gradient of each parameter in each step, got two of {name}"
            raise CannotTrain(f"{what}; use use_reentrant=False for checkpoints of shared layers")
        self.arrived[parameter] = None
        if self.buckets:
            self.bucket_of[parameter].missing -= 1
        # All ranks send their buckets in the same order.
        while self.sent < len(self.buckets) and not self.buckets[self.sent].missing:
            self._send(self.buckets[self.sent])

    def _send(self, bucket: Bucket) -> None:
        self.sent += 1
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            bucket.fill()
            bucket.sum()

    def _finish(self) -> None:
        """End a backward pass, so that later work on the GPU waits for the summed gradients."""
        if len(self.arrived) < len(self.trained):
            return  # an inner backward pass has ended
        arrived, self.arrived, self.task = self.arrived, {}, -1
        if not self.buckets:
            self._make_buckets(arrived)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.sent = 0
        for bucket in self.buckets:
            bucket.release()

    def _make_buckets(self, arrived: Collection[nn.Parameter]) -> None:
        parameters = list(self.trained.values())
        places = {parameter: place for place, parameter in enumerate(parameters)}
        order = torch.tensor([places[parameter] for parameter in arrived], device=self.device)
        dist.broadcast(order, 0)
        groups = list(divided([parameters[place] for place in order.tolist()], self.spec))
        self.buckets = [Bucket(group, self.spec, is_last=group is groups[-1]) for group in groups]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        for bucket in self.buckets:
            self._send(bucket)


class Bucket:
    """A contiguous buffer of gradients that one all-reduce sums over all ranks.

    The buffer `flat` lays out the gradients like their parameters. Gradients whose size would
    misalign the next gradient are at the end.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], spec: TrainingSpec, *, is_last: bool) -> None:
        self.parameters = sorted(parameters, key=lambda parameter: parameter.nbytes % ALIGNED_BYTES != 0)
        self.missing = len(parameters)
        self.gradients: list[Tensor] = []
        self.work: dist.Work | None = None
        sizes = [parameter.numel() for parameter in self.parameters]
        dtype, device = parameters[0].dtype, parameters[0].device
        make = symmetric_buffer if spec.maps_memory else torch.empty
        # The kernels for mapped memory read as wide as the buffer's size allows.
        padding = -sum(sizes) % ALIGNED_BYTES if spec.maps_memory else 0
        self.flat = make(sum(sizes) + padding, dtype=dtype, device=device).zero_()
        self.views = []
        for parameter, part in zip(self.parameters, self.flat.split([*sizes, padding]), strict=False):
            strides = torch.empty_like(parameter, device="meta").stride()
            self.views.append(self.flat.as_strided(parameter.shape, strides, part.storage_offset()))
        self.sum_mapped = all_reduce_of(self.flat, is_last) if spec.maps_memory else None

    def fill(self) -> None:
        """Copy the gradients of all parameters in a bucket to the bucket's buffer, with one kernel.

        Afterwards the parameters' gradients are views of the buffer.
        """
        self.gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_copy_(self.views, self.gradients)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def sum(self) -> None:
        """Sum a bucket's buffer over all ranks in place; on a CPU, only start the sum."""
        if self.sum_mapped is not None:
            self.sum_mapped()
        else:
            self.work = dist.all_reduce(self.flat, async_op=self.flat.device.type == "cpu")

    def release(self) -> None:
        """Wait until a gradient bucket is summed, and free the gradients that were copied to it.

        If the gradients were freed earlier, their memory could be reused while another stream reads
        it.
        """
        if self.work is not None:
            self.work.wait()
        self.gradients = []
        self.missing = len(self.parameters)


def all_reduce_of(bucket: Tensor, is_last: bool) -> Callable[[], object]:
    """Return the all-reduce in mapped memory that makes a step fastest, for a bucket's buffer.

    A kernel for the last bucket delays no computation, because the backward pass has ended. Above
    MOST_BYTES, low_latency would gain little and take much memory.
    """
    if is_last and bucket.dtype == torch.float32 and bucket.nbytes <= MOST_BYTES:
        from ddpperf.collectives.low_latency import LowLatency  # a torch for the CPU may lack Triton

        return LowLatency(bucket, bucket).sum
    if bucket.dtype in KERNEL_TYPES and (is_last or bucket.nbytes <= TWO_SHOT_BYTES):
        return partial(two_shot, bucket)
    return CopyEngines(bucket).sum


def divided(parameters: Sequence[nn.Parameter], spec: TrainingSpec) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each gradient bucket, in order and separately for each data type.

    A bucket has at least LEAST_BYTES, except for the last bucket. bucket_cap_mb limits the size of
    a bucket, unless the bucket would have less than LEAST_BYTES. Without bucket_cap_mb, a bucket
    has half of the remaining bytes. This makes the last bucket small, during which nothing is
    computed. A compiled backward pass returns its gradients in two parts, so that there are two
    buckets.
    """
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        of_type = [parameter for parameter in parameters if parameter.dtype == dtype]
        rest = sum(parameter.nbytes for parameter in of_type)
        half = rest / 2
        bucket: list[nn.Parameter] = []
        for parameter in of_type:
            held = sum(parameter.nbytes for parameter in bucket)
            if spec.bucket_cap_mb:
                full = held + parameter.nbytes > spec.bucket_cap_mb * 2**20
            elif spec.compiled:
                full = held >= half
            else:
                full = held + parameter.nbytes > min(MOST_BYTES, rest / 2)
            if full and held >= LEAST_BYTES:
                yield bucket
                rest -= held
                bucket = []
            bucket.append(parameter)
        yield bucket
