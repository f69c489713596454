"""Wrap a model for training by DDP, ddpperf's OwnDDP, FSDP, ZeRO or DataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpperf.errors import CannotTrain
from ddpperf.measuring.message_ledger import Ledger, Message
from ddpperf.specs import TrainingSpec, is_custom_model
from ddpperf.specs.training_step import DDP_STRATEGIES
from ddpperf.training import comm_hooks
from ddpperf.training.model_and_data import model_and_data
from ddpperf.training.models import trained_parameters
from ddpperf.training.own_ddp import OwnDDP

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WATCHED_STEPS = 3  # of a model without a strategy
LEARNING_STEPS = 3  # DDP arranges its buckets again after the first step
# DDP's option was renamed in torch 2.13.
_IS_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_BUFFER_SYNC = "forward_sync_buffers" if _IS_NEW else "broadcast_buffers"


def parallelize(model: nn.Module, spec: TrainingSpec, device: torch.device) -> nn.Module:
    """Wrap a model for the strategy of a training spec, such as DDP or FSDP.

    The ranks communicate in the default process group.
    """
    if spec.sync_batch_norm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if spec.strategy in DDP_STRATEGIES:
        options: dict[str, Any] = {_BUFFER_SYNC: spec.buffer_sync}
        ddp = DistributedDataParallel(
            _Whole(model) if spec.compiled and isinstance(model, nn.Sequential) else model,
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=spec.bucket_cap_mb or None,
            gradient_as_bucket_view=spec.gradient_as_bucket_view,
            static_graph=spec.static_graph,
            **options,
        )
        comm_hooks.register(ddp, spec, device)
        return ddp
    if spec.strategy == "own_ddp":
        return OwnDDP(model, spec, device)
    if spec.strategy == "fsdp":
        if is_custom_model(spec.model):
            require_all_used(spec, dist.get_rank(), device)
        return _fsdp(model, spec, device)
    if spec.strategy == "data_parallel":
        dtype = AUTOCAST_DTYPES.get(spec.precision)
        inner = model if dtype is None else _Autocast(model, device.type, dtype)
        return DataParallel(inner, device_ids=list(range(spec.world_size)))
    return model


class _Autocast(nn.Module):
    """Wrapper of a module that runs it under autocast in every thread.

    DataParallel's threads switch autocast on, but with the data type of new threads, which is fp16.
    """

    def __init__(self, module: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.device, self.dtype = module, device, dtype

    def forward(self, inputs: Any) -> Any:
        with torch.autocast(self.device, self.dtype):
            return self.module(inputs)


class _Whole(nn.Module):
    """Wrapper of an nn.Sequential, because torch.compile skips torch's own modules inside DDP."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs)


def _fsdp(model: nn.Module, spec: TrainingSpec, device: torch.device) -> nn.Module:
    """Wrap a model by FSDP with one unit for each child module, and one unit for the rest.

    A custom model is one unit, because it may use its children in other ways than by calling them.
    """
    # Imported here, because the imports are slow.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (spec.world_size,))
    for child in [] if is_custom_model(spec.model) else model.children():
        if list(child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def synchronization(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Return a context manager that synchronizes gradients only in a batch's last micro-batch."""
    fsdp: Any = model
    if hasattr(fsdp, "set_requires_gradient_sync"):
        fsdp.set_requires_gradient_sync(last)
    if isinstance(model, OwnDDP):
        model.synchronizes = last
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def gradient_bytes(module: nn.Module, itemsize: int | None = None) -> int:
    """Return the bytes of all gradients of a model that is not yet wrapped by DDP or FSDP.

    itemsize: the bytes of each element, by default as many as the parameter's elements have.
    """
    return sum(each.numel() * (itemsize or each.element_size()) for each in trained_parameters(module))


def require_equal_parameters(model: nn.Module, spec: TrainingSpec) -> None:
    """Raise an error on every rank unless all ranks hold bit-identical model parameters.

    The error is CannotTrain if the model itself makes them differ, and otherwise RuntimeError.
    """
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
        least, greatest = bits.clone(), bits.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        if not torch.equal(least, greatest):
            is_own = is_custom_model(spec.model)
            if is_own and name in set_in_forward(spec, dist.get_rank(), parameter.device):
                what = f"sets its parameter {name} in its first forward pass, each rank from its own batch"
                raise CannotTrain(f"model {spec.model} {what}; set it before the training")
            why = "gradients were not synchronized"
            raise RuntimeError(f"parameter {name} differs between ranks after training: {why}")


def set_in_forward(spec: TrainingSpec, rank: int, device: torch.device) -> set[str]:
    """Return the names of the parameters that a new model changes in its first forward pass."""
    module, input, _ = model_and_data(spec, rank, device)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    input.begin(0)
    input.load()
    with torch.no_grad():
        module(input.take()[0])
    return {name for name, after in module.named_parameters() if not torch.equal(before[name], after)}


def own_messages(spec: TrainingSpec, rank: int, device: torch.device) -> list[Message]:
    """Return the collectives that a model calls itself in a step, such as those of SyncBatchNorm.

    Some models call others in their first step than later.
    """
    found = Counter[Message]()
    with (ledger := Ledger()):
        for _ in islice(_bare_steps(spec, rank, device, ledger.enter_part), WATCHED_STEPS):
            found |= Counter(ledger.messages)
            ledger.messages = []
    return list(found.elements())


def require_all_used(spec: TrainingSpec, rank: int, device: torch.device) -> None:
    """Raise CannotTrain if a step uses a part of a model's parameters only.

    FSDP leaves the others out of its messages. If the ranks leave out different ones, gloo ends them.
    """
    for name, parameter in next(_bare_steps(spec, rank, device)).named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            what = f"fsdp needs a gradient of each parameter in each step, got none of {name}"
            raise CannotTrain(f"{what}; use all in each step, or set their requires_grad to False")


def _bare_steps(
    spec: TrainingSpec, rank: int, device: torch.device, enter: Callable[[str], None] = lambda part: None
) -> Iterator[nn.Module]:
    """Yield a new model without a strategy after the backward passes of each step."""
    module, input, loss = model_and_data(spec, rank, device)
    if spec.sync_batch_norm:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    input.begin(0)
    input.load()
    dtype = AUTOCAST_DTYPES.get(spec.precision)
    while True:
        parts = [whole.chunk(spec.accumulation_steps) for whole in input.take()]
        for inputs, targets in zip(*parts, strict=True):
            enter("forward")
            with torch.autocast(device.type, dtype, dtype is not None):
                value = loss(module(inputs), targets)
            enter("backward")
            value.backward()
        yield module


def bucket_messages(spec: TrainingSpec, rank: int, device: torch.device) -> list[comm_hooks.BucketMessage]:
    """Return the number of elements and the data type of each of DDP's gradient buckets."""
    module, input, loss = model_and_data(spec, rank, device)
    plain = dataclasses.replace(spec, comm_hook="none", communication="on", comm_delay_seconds=0.0)
    ddp: Any = parallelize(module, plain, device)
    hook = comm_hooks.OwnAverage(spec, device)
    ddp.register_comm_hook(None, hook.average)
    for _ in range(LEARNING_STEPS):
        input.begin(0)  # in each step, because an epoch may have only one batch
        input.load()
        inputs, targets = input.take()
        loss(ddp(inputs), targets).backward()
        ddp.zero_grad()
    return hook.messages
