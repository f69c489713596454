"""How a model is trained by several devices: DDP and its options, our own one, FSDP, ZeRO's first stage, DataParallel."""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpperf.specs import TrainingSpec, is_custom_model
from ddpperf.specs.strategy import DDP_STRATEGIES
from ddpperf.training import comm_hooks
from ddpperf.training.own_ddp import OwnDDP

# its name before torch 2.13, and from then on
_BUFFER_SYNC = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def parallelize(
    model: nn.Module, spec: TrainingSpec, device: torch.device, hook: comm_hooks.OwnAverage | None = None
) -> nn.Module:
    """`model` as the spec's strategy trains it; the process group, where one is needed, is the default one.

    hook: of DDP's gradients, instead of the spec's.
    """
    if spec.sync_batch_norm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if spec.strategy in DDP_STRATEGIES:
        return _ddp(model, spec, device, hook)
    if spec.strategy == "own_ddp":
        return OwnDDP(model, spec, device)
    if spec.strategy == "fsdp":
        return _fsdp(model, spec, device)
    if spec.strategy == "data_parallel":
        return DataParallel(model, device_ids=list(range(spec.world_size)))
    return model


class _Whole(nn.Module):
    """A Sequential as a module of its own: inside DDP torch.compile passes over torch's own modules."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs)


def _ddp(
    model: nn.Module, spec: TrainingSpec, device: torch.device, hook: comm_hooks.OwnAverage | None
) -> DistributedDataParallel:
    options: dict[str, Any] = {_BUFFER_SYNC: spec.buffer_sync}
    ddp = DistributedDataParallel(
        _Whole(model) if spec.compiled and isinstance(model, nn.Sequential) else model,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=spec.bucket_cap_mb or None,
        gradient_as_bucket_view=spec.gradient_as_bucket_view,
        static_graph=spec.static_graph,
        **options,
    )
    comm_hooks.register(ddp, spec, device, hook)
    return ddp


def _fsdp(model: nn.Module, spec: TrainingSpec, device: torch.device) -> nn.Module:
    """Each of the model's children is gathered, used and freed as one, and what lies beside them with the whole model; a user's
    own model, whose children may be used in other ways than by calling them, as one."""
    from torch.distributed.device_mesh import (
        init_device_mesh,
    )  # only here: every rank would wait for the import
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (spec.world_size,))
    for child in [] if is_custom_model(spec.model) else model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def synchronization(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Around forward and backward of one part of a batch: only the `last` part's gradients are synchronized."""
    fsdp: Any = model
    if hasattr(fsdp, "set_requires_gradient_sync"):
        fsdp.set_requires_gradient_sync(last)
    if isinstance(model, OwnDDP):
        model.synchronizes = last
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return contextlib.nullcontext()


def require_equal_parameters(model: nn.Module) -> None:
    """Raise RuntimeError on every rank unless all ranks hold bit-identical parameters."""
    for name, parameter in model.named_parameters():
        bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
        least, greatest = bits.clone(), bits.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        if not torch.equal(least, greatest):
            raise RuntimeError(
                f"parameter {name} differs between ranks after training: gradients were not synchronized"
            )
