"""Data-parallel training as short as it can be written: gradients are copied into buckets, and these summed over all ranks
while the backward pass goes on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpperf.collectives.symmetric_memory import KERNEL_TYPES, CopyEngines, symmetric_buffer, two_shot
from ddpperf.errors import CannotTrain
from ddpperf.specs import TrainingSpec

MOST_BYTES = 25 * 2**20  # of a bucket, as torch's DDP has it
LEAST_BYTES = 2**19
TWO_SHOT_BYTES = 2**21  # up to here copy engines take longer than kernels take away from the backward pass
ALIGNED_BYTES = 16  # that are read at once from an address that they divide


class OwnDDP(nn.Module):
    """`module`, whose gradients are the sum of all ranks' after a backward pass: each rank weighs its loss by its share of the
    global batch. All ranks begin with rank 0's parameters and buffers; from then on buffers are each rank's own.

    Buckets are made at the end of the first backward pass, in the order in which rank 0's gradients came. While `synchronizes`
    is False gradients add up on this rank. Raises CannotTrain if a parameter gets no gradient; if that is so on some ranks
    alone, the others wait for them.
    """

    def __init__(self, module: nn.Module, spec: TrainingSpec, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.spec = spec
        self.device = device
        self.synchronizes = True
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[nn.Parameter, Bucket] = {}
        self.arrived: list[nn.Parameter] = []  # those that have their gradient of this backward pass
        self.sent = 0  # buckets of it
        for state in module.state_dict().values():
            dist.broadcast(state, 0)
        me = weakref.ref(self)  # torch never lets go of a hook that its own parameter is reachable from

        def arrive(parameter: nn.Parameter) -> None:
            if (model := me()) is not None:
                model._arrive(parameter)

        for parameter in self.trained.values():
            parameter.register_post_accumulate_grad_hook(arrive)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def _arrive(self, parameter: nn.Parameter) -> None:
        if not self.synchronizes:
            return
        if not self.arrived:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.arrived.append(parameter)
        if self.buckets:
            self.bucket_of[parameter].missing -= 1
        while (
            self.sent < len(self.buckets) and not self.buckets[self.sent].missing
        ):  # by all ranks in one order
            self._send(self.buckets[self.sent])

    def _send(self, bucket: Bucket) -> None:
        """Beside the backward pass, which goes on."""
        self.sent += 1
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            bucket.fill()
            bucket.sum()

    def _finish(self) -> None:
        """At the end of a backward pass: what follows waits for the sums."""
        arrived, self.arrived = self.arrived, []
        if len(arrived) < len(self.trained):
            missing = next(
                name for name, each in self.trained.items() if all(each is not other for other in arrived)
            )
            raise CannotTrain(
                f"own_ddp needs a gradient of each parameter in each step, got none of {missing}; "
                "use all in each step, or set their requires_grad to False"
            )
        if not self.buckets:
            self._make_buckets(arrived)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.sent = 0
        for bucket in self.buckets:
            bucket.release()

    def _make_buckets(self, arrived: Sequence[nn.Parameter]) -> None:
        parameters = list(self.trained.values())
        places = {parameter: place for place, parameter in enumerate(parameters)}
        order = torch.tensor([places[each] for each in arrived], device=self.device)
        dist.broadcast(order, 0)
        groups = list(divided([parameters[place] for place in order.tolist()], self.spec))
        self.buckets = [Bucket(each, self.spec, is_last=each is groups[-1]) for each in groups]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        for bucket in self.buckets:
            self._send(bucket)


class Bucket:
    """Gradients that are sent together: `flat` holds them one after the other, each laid out as its parameter is; at the end
    those after which another one would not be aligned."""

    def __init__(self, parameters: Sequence[nn.Parameter], spec: TrainingSpec, *, is_last: bool) -> None:
        self.parameters = sorted(parameters, key=lambda each: each.nbytes % ALIGNED_BYTES != 0)
        self.missing = len(parameters)
        self.gradients: list[Tensor] = []
        self.work: dist.Work | None = None
        sizes = [each.numel() for each in self.parameters]
        dtype, device = parameters[0].dtype, parameters[0].device
        make = symmetric_buffer if spec.maps_memory else torch.empty
        padding = (
            -sum(sizes) % ALIGNED_BYTES if spec.maps_memory else 0
        )  # its kernels read as much at once as the whole allows
        self.flat = make(sum(sizes) + padding, dtype=dtype, device=device).zero_()
        self.views = [
            self.flat.as_strided(
                each.shape, torch.empty_like(each, device="meta").stride(), part.storage_offset()
            )
            for each, part in zip(self.parameters, self.flat.split([*sizes, padding]), strict=False)
        ]
        self.mapped = spec.maps_memory
        by_kernel = (
            is_last or self.flat.nbytes <= TWO_SHOT_BYTES
        )  # beside the last bucket nothing is computed
        self.engines = (
            CopyEngines(self.flat) if self.mapped and not (by_kernel and dtype in KERNEL_TYPES) else None
        )

    def fill(self) -> None:
        """Copy the gradients here, by one kernel; from now on they are the parameters' gradients here."""
        self.gradients = [each.grad for each in self.parameters if each.grad is not None]
        torch._foreach_copy_(self.views, self.gradients)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def sum(self) -> None:
        """Over all ranks, in place; on the CPU it has only begun."""
        if self.engines is not None:
            self.engines.sum()
        elif self.mapped:
            two_shot(self.flat)
        else:
            self.work = dist.all_reduce(self.flat, async_op=self.flat.device.type == "cpu")

    def release(self) -> None:
        """Wait for what has only begun, and let go of the gradients that were copied: before, their memory could be used again
        while another stream reads it."""
        if self.work is not None:
            self.work.wait()
        self.gradients = []
        self.missing = len(self.parameters)


def divided(parameters: Sequence[nn.Parameter], spec: TrainingSpec) -> Iterator[list[nn.Parameter]]:
    """The parameters of each type, in their order, as buckets of at least LEAST_BYTES, but for the last, and if that allows it
    of at most `bucket_cap_mb`.

    Without one: of half of what is left, so that the last, beside which nothing is computed, is small. A compiled backward pass
    gives its gradients at two times (forms.py): two buckets, of which the first has half of all or more.
    """
    for dtype in dict.fromkeys(each.dtype for each in parameters):
        yield from _divided([each for each in parameters if each.dtype == dtype], spec)


def _divided(parameters: Sequence[nn.Parameter], spec: TrainingSpec) -> Iterator[list[nn.Parameter]]:
    rest = sum(each.nbytes for each in parameters)
    half = rest / 2
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        held = sum(each.nbytes for each in bucket)
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
